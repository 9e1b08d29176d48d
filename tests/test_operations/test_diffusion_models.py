"""Diffusion models become GGUF files for ComfyUI and checkpoints again (tests/data/comfyui)."""

import json

import numpy as np
import pytest
from builders.diffusion import FILE_TYPES, INNER, MODELS, QUANTIZED, model, others
from builders.http_server import Server
from builders.inside import main
from builders.llama_quantize import digest
from builders.paths import DATA, ROOT

import safeload
from safeload import FormatError, UnsupportedError, gguf
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

ROWS = json.loads((ROOT / "safeload" / "models" / "diffusion.json").read_text("utf-8"))
EXPECTED = json.loads((DATA / "comfyui" / "files.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(tensors, **options):
    """The digest of a converted model; "x.gguf" has it."""
    save_file(tensors, "x.safetensors")
    safeload.convert("x.safetensors", "x.gguf", overwrite=True, **options)
    with open("x.gguf", "rb") as file:
        return digest(file.read())


def test_the_fixtures_have_every_architecture_and_file_type():
    assert {name.split()[0] for name in MODELS} == ROWS.keys()
    assert EXPECTED["converted"].keys() == MODELS.keys()
    assert EXPECTED["quantized"].keys() == set(QUANTIZED)
    assert all(row.keys() == set(FILE_TYPES) for row in EXPECTED["quantized"].values())


@pytest.mark.parametrize("name", MODELS)
def test_files_equal_those_of_comfyuis_converter(name):
    for dtype, expected in EXPECTED["converted"][name].items():
        assert convert(model(name, dtype)) == expected, dtype


@pytest.mark.parametrize("name", QUANTIZED)
def test_files_equal_those_of_comfyuis_llama_quantize(name):
    """In one step from the checkpoint, and in two steps as with ComfyUI-GGUF's tools."""
    tensors = model(name)
    for file_type, expected in EXPECTED["quantized"][name].items():
        assert convert(tensors, quantize=file_type) == expected, file_type
    convert(tensors)
    for file_type in ("q4_k_m", "q8_0", "q3_k_m"):
        safeload.convert("x.gguf", "y.gguf", quantize=file_type, overwrite=True)
        with open("y.gguf", "rb") as file:
            assert digest(file.read()) == EXPECTED["quantized"][name][file_type], file_type


def test_other_parts_of_a_checkpoint_are_left_out(caplog):
    alone = convert(model("sd1"), quantize="q4_k_m")
    assert convert(model("sd1", prefix=INNER) | others(), quantize="q4_k_m") == alone
    assert "only the diffusion model (sd1) is converted, without 2 other tensors, such as" in caplog.text


@pytest.mark.parametrize("prefix", [INNER, "model.", "net.", f"state_dict.{INNER}", f"module.{INNER}", "state_dict."])
def test_prefixes_are_cut(prefix):
    safeload.convert(model("flux", prefix=prefix), "y.gguf")
    assert list(safeload.open("y.gguf")) == list(model("flux"))


def test_torch_checkpoints_are_converted(folder):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array) for name, array in model("sd1", "float16", INNER).items()}
    torch.save({"global_step": 3, "state_dict": tensors}, "x.ckpt")
    safeload.convert("x.ckpt", "x.gguf", quantize="q4_k_m")
    safeload.convert(model("sd1", "float16"), "y.gguf", quantize="q4_k_m")
    assert (folder / "x.gguf").read_bytes() == (folder / "y.gguf").read_bytes()


def test_types_of_float32_sources_are_those_of_two_steps_and_values_closer(folder):
    tensors = model("flux", "float32")
    save_file(tensors, "x.safetensors")
    safeload.convert("x.safetensors", "once.gguf", quantize="q5_k_m")
    safeload.convert("x.safetensors", "f16.gguf")
    safeload.convert("f16.gguf", "twice.gguf", quantize="q5_k_m")
    once, twice = safeload.open("once.gguf"), safeload.open("twice.gguf")
    assert {n: t.dtype for n, t in once.tensors.items()} == {n: t.dtype for n, t in twice.tensors.items()}
    name = "double_blocks.0.img_attn.proj.weight"
    direct = safeload.quantize(tensors[name], "q5_k")
    assert once[name].data.tobytes() == direct.data.tobytes() != twice[name].data.tobytes()


def test_axes_of_size_1_stay_and_do_not_count():
    """ComfyUI-GGUF's llama-quantize drops them from the shapes."""
    extra = {
        "one.weight": (1, 2048),
        "flat.weight": (1, 8, 256),
        "cube.weight": (2, 4, 256),
        "last.weight": (8, 256, 1),
    }
    convert(model("flux") | {name: np.ones(shape, np.float16) for name, shape in extra.items()}, quantize="q4_k_s")
    types = {name: info.dtype for name, info in safeload.open("x.gguf").tensors.items() if name in extra}
    assert types == {"one.weight": "F16", "flat.weight": "Q4_K", "cube.weight": "F16", "last.weight": "F16"}
    assert {name: safeload.open("x.gguf").tensors[name].shape for name in extra} == extra


@pytest.mark.parametrize("file_type", ["q4_0", "q8_0", "q4_k_m"])
def test_rows_that_are_not_whole_blocks_become_float16(file_type):
    convert(model("flux") | {"odd.weight": np.ones((64, 100), np.float32)}, quantize=file_type)
    assert safeload.open("x.gguf").tensors["odd.weight"].dtype == "F16"


def test_dtype_and_patterns_choose_types():
    tensors = model("sd1", "float16")
    convert(tensors, dtype="bfloat16", quantize={"*.to_q.weight": "q8_0", "*": "q4_k_s"})
    with safeload.open("x.gguf") as file:
        types, number = {name: info.dtype for name, info in file.tensors.items()}, file.metadata["general.file_type"]
    assert types["middle_block.1.transformer_blocks.0.attn1.to_q.weight"] == "Q8_0"
    assert types["middle_block.1.transformer_blocks.0.attn1.to_k.weight"] == "Q4_K"
    assert types["input_blocks.0.0.weight"] == "BF16"
    assert number == 14
    convert(model("sd1", "float32"), dtype="bfloat16")
    types = {name: info.dtype for name, info in safeload.open("x.gguf").tensors.items()}
    assert (types["out.0.weight"], types["few.weight"], types["whole.weight"]) == ("F32", "F32", "BF16")


def test_names_of_the_source_select_tensors():
    tensors = model("flux", prefix=INNER)
    kept = f"{INNER}double_blocks.0.*"
    save_file(tensors, "x.safetensors")
    report = safeload.convert("x.safetensors", "x.gguf", quantize="q4_k_m", keep=kept)
    types = {name: info.dtype for name, info in safeload.open("x.gguf").tensors.items()}
    assert types["double_blocks.0.img_mlp.0.weight"] == "BF16"
    assert types["double_blocks.1.img_mlp.0.weight"] == "Q4_K"
    assert report.summary.kept["double_blocks.0.img_mlp.0.weight"].startswith("keep=")


def test_an_importance_matrix_weighs_columns(folder):
    name = "double_blocks.0.img_attn.proj.weight"
    tensors = model("flux")
    importance = np.linspace(0, 9, 256, dtype=np.float32)
    parts = {}
    for other, array in tensors.items():
        if array.ndim > 1:
            parts[f"{other}.in_sum2"] = np.resize(importance, (1, array.shape[-1]))
            parts[f"{other}.counts"] = np.ones((1, 1), np.float32)
    keys = {"imatrix.datasets": ["x"], "imatrix.chunk_count": np.uint32(1), "imatrix.chunk_size": np.uint32(8)}
    gguf.save_file(parts, "imatrix.gguf", {"general.type": "imatrix", **keys})
    convert(tensors, quantize="q2_k_s", imatrix="imatrix.gguf")
    expected = safeload.quantize(tensors[name], "q2_k", importance=importance)
    assert safeload.open("x.gguf")[name].data.tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_every_way_to_read_a_divided_tensor_gives_its_rows(dtype):
    """Copied, converted, quantized from a file, and as arrays that are in memory."""
    name = "input_blocks.3.0.op.weight"
    tensors = model("sd1", dtype)
    expected = tensors[name].astype(np.float32).reshape(36, 256)
    save_file(tensors, "x.safetensors")
    for source in ("x.safetensors", tensors):
        for options in ({}, {"dtype": "float32"}, {"dtype": "float16"}, {"quantize": "q8_0"}):
            safeload.convert(source, "x.gguf", overwrite=True, **options)
            with safeload.open("x.gguf", stored=True) as opened:
                assert opened.tensors[name].shape == (36, 256)
                value = opened[name]
            if "quantize" in options:
                assert value == safeload.quantize(expected, "q8_0")
            else:
                want = expected.astype(options.get("dtype", value.dtype))
                np.testing.assert_array_equal(value.astype(np.float32), want.astype(np.float32))


def test_a_url_is_converted(folder):
    save_file(model("sd1"), "x.safetensors")
    safeload.convert("x.safetensors", "x.gguf", quantize="q4_k_m")
    pytest.importorskip("urllib3")
    with Server(folder) as server:
        safeload.convert(server.url("/x.safetensors"), "y.gguf", quantize="q4_k_m")
    assert (folder / "x.gguf").read_bytes() == (folder / "y.gguf").read_bytes()


def test_the_command_converts_there_and_back(folder, capsys):
    save_file(model("sdxl"), "x.safetensors")
    assert main(["convert", "x.safetensors", "x.gguf", "--quantize", "q4_k_m"]) == 0
    assert "quantized to q6_k" in capsys.readouterr().out
    assert digest((folder / "x.gguf").read_bytes()) == EXPECTED["quantized"]["sdxl"]["q4_k_m"]
    assert main(["convert", "x.gguf", "y.safetensors", "--dtype", "float32"]) == 0
    assert safeload.open("y.safetensors").tensors["out.2.weight"].shape == (4, 32, 3, 3)


# ---- refusals: nothing is written ----


def refused(error, message, tensors, **options):
    with pytest.raises(error, match=message):
        convert(tensors, **options)
    with pytest.raises(FileNotFoundError):
        safeload.open("x.gguf")


@pytest.mark.parametrize("name", [name for name in ROWS if name not in QUANTIZED])
@pytest.mark.parametrize("quantize", ["q4_k_m", {"*": "q8_0"}])
def test_other_architectures_are_not_quantized(name, quantize):
    message = rf'quantizes the diffusion models flux, sdxl, sd1, not {name}: pass dtype="float16"'
    refused(UnsupportedError, message, model(name), quantize=quantize)


@pytest.mark.parametrize("file_type", ["iq4_nl", "iq4_xs", "mxfp4"])
def test_file_types_without_rules_are_refused(file_type):
    refused(
        UnsupportedError, "has no rules for diffusion models, expected one of q4_0", model("flux"), quantize=file_type
    )


@pytest.mark.parametrize("diffusers", [row["diffusers"] for row in ROWS.values() if "diffusers" in row])
def test_the_layout_of_diffusers_is_refused(diffusers):
    tensors = {"transformer_blocks.0.norm.weight": np.ones(8, np.float32), diffusers: np.ones((8, 8), np.float32)}
    refused(UnsupportedError, "is from Diffusers, but ComfyUI loads", tensors)
    assert safeload.convert(tensors, "raw.gguf", raw=True).tensors == 2


@pytest.mark.parametrize("axes", [5, 6])
def test_tensors_of_more_axes_than_ggml_has_are_written_for_comfyui(axes, tmp_path):
    patch = np.arange(24, dtype=np.float16).reshape((2, 3, *(1,) * (axes - 4), 2, 2))
    path = tmp_path / "wan.gguf"
    safeload.convert(model("wan") | {"patch_embedding.weight": patch}, path)
    stored = safeload.load(path)["patch_embedding.weight"]
    assert stored.shape == patch.shape
    np.testing.assert_array_equal(stored, patch)
    copy = safeload.convert(path, tmp_path / "copy.gguf")
    assert copy.tensors == len(safeload.open(path))
    np.testing.assert_array_equal(safeload.load(tmp_path / "copy.gguf")["patch_embedding.weight"], patch)


def test_five_axes_of_a_language_model_are_refused(tmp_path):
    for metadata in ({}, {"general.architecture": "llama"}):
        with pytest.raises(safeload.SafeloadError, match="has 5 dims, but ggml reads at most 4") as caught:
            safeload.gguf.save_file({"a": np.ones((1,) * 5, np.float32)}, tmp_path / "x.gguf", metadata)
        assert caught.value.tensor == "a"


def test_shapes_beyond_int32_are_refused():
    tensors = model("sd1")
    name = next(name for name in tensors if name.endswith("proj_in.weight"))
    tensors[name] = np.broadcast_to(np.float16(0), (1 << 31, 3))
    with pytest.raises(UnsupportedError, match="its shape does not fit int32") as caught:
        safeload.convert(tensors, "x.gguf")
    assert caught.value.tensor == name


def test_integers_are_refused():
    refused(UnsupportedError, "is int64, but ComfyUI loads only floating", model("flux") | {"ids": np.arange(4)})


@pytest.mark.parametrize("options", [{"only": "img_in.*"}, {"drop": "img_in.*"}, {"rename": [("a", "b")]}])
def test_a_part_of_a_model_is_refused(options):
    refused(ValueError, "would leave no complete model: pass raw=True", model("flux"), **options)


def test_other_dtypes_are_refused():
    refused(UnsupportedError, "ComfyUI does not compute with float64", model("flux"), dtype="float64")


def test_two_bits_need_an_importance_matrix():
    refused(UnsupportedError, "an importance matrix for: pass imatrix=", model("flux"), quantize="q2_k_s")


def test_raw_keeps_names_and_shapes():
    tensors = model("sd1", prefix=INNER)
    convert(tensors, raw=True)
    assert {name: info.shape for name, info in safeload.open("x.gguf").tensors.items()} == {
        name: array.shape for name, array in tensors.items()
    }


# ---- the way back ----


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_there_and_back_is_the_identity(name, dtype):
    tensors = model(name, dtype)
    convert(tensors)
    safeload.convert("x.gguf", "back.safetensors", dtype=dtype)
    back = safeload.open("back.safetensors")
    ignored = ROWS[name.split()[0]].get("left_out", ())
    expected = {key: array for key, array in tensors.items() if not any(part in key for part in ignored)}
    assert back.keys() == expected.keys()
    for key, array in expected.items():
        assert (back[key].dtype, back[key].shape, back[key].tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.metadata == {"general.architecture": name.split()[0]}


@pytest.mark.parametrize("destination", ["back.safetensors", "back/", "back.npz"])
def test_blocks_come_back_in_their_original_shapes(destination):
    tensors = model("sd1", "float16")
    convert(tensors, quantize="q8_0")
    assert safeload.open("x.gguf").tensors["input_blocks.3.0.op.weight"].shape == (32, 32, 3, 3)
    assert safeload.open("x.gguf", stored=True).tensors["input_blocks.3.0.op.weight"].shape == (36, 256)
    safeload.convert("x.gguf", destination)
    back = safeload.load(destination)
    for key, array in tensors.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(back[key].astype(np.float32), array.astype(np.float32), atol=1e-3)
    safeload.convert("x.gguf", "raw.safetensors", raw=True)
    assert safeload.open("raw.safetensors").tensors["input_blocks.3.0.op.weight"].shape == (36, 256)


def test_blocks_come_back_as_16_bits_of_the_rest():
    convert(model("flux"), quantize="q8_0")
    safeload.convert("x.gguf", "some.safetensors", only="double_blocks.0.*")
    assert safeload.open("some.safetensors").tensors["double_blocks.0.img_mod.lin.weight"].dtype == "BF16"
    with pytest.raises(UnsupportedError, match="the folder of a GGUF model is written at once"):
        safeload.convert("x.gguf", "back/", resume=True)


def test_integers_that_are_dropped_do_not_matter():
    tensors = {"a": np.ones((4, 32), np.float32), "n": np.arange(3, dtype=np.int32)}
    safeload.convert(tensors, "x.gguf", metadata={"general.architecture": "flux"}, raw=True)
    assert safeload.convert("x.gguf", "back.safetensors", drop="n").tensors == 1
    with pytest.raises(FormatError, match="'n' is int32, expected floating-point numbers"):
        safeload.convert("x.gguf", "all.safetensors")


def test_renamed_tensors_keep_their_original_shapes():
    tensors = model("sd1", "float16")
    convert(tensors, quantize="q4_k_m")
    safeload.convert("x.gguf", "y.gguf", rename=[("^", INNER), ("input_blocks.3", "input_blocks.4")])
    safeload.convert("y.gguf", "z.gguf", rename=[(f"^{INNER}", ""), ("input_blocks.4", "input_blocks.3")])
    safeload.convert("y.gguf", "y.safetensors")
    name = "input_blocks.3.0.op.weight"
    assert safeload.open("y.safetensors").tensors[f"{INNER}input_blocks.4.0.op.weight"].shape == tensors[name].shape
    with open("x.gguf", "rb") as there, open("z.gguf", "rb") as back:
        assert there.read() == back.read()


@pytest.mark.parametrize(
    "shape",
    [
        np.array([32, 32, 3, 4], np.int32),
        np.array([-32, -32, 3, 3], np.int32),
        np.array([], np.int32),
        np.array([32, 32, 3, 3], np.int64),
        np.array([1] * 65 + [9216], np.int32),
        np.uint32(9216),
        "32 x 32",
        [[32], [288]],
    ],
    ids=["size", "negative", "no-axes", "64-bit", "66-axes", "number", "text", "nested"],
)
def test_shapes_that_do_not_fit_are_refused(shape):
    convert(model("sd1"))
    name = "input_blocks.3.0.op.weight"
    with safeload.open("x.gguf") as file:
        gguf.save_file(file.load(), "bad.gguf", {**file.metadata, "comfy.gguf.orig_shape." + name: shape})
    with pytest.raises(FormatError, match=rf"key 'comfy\.gguf\.orig_shape\.{name}'"):
        safeload.convert("bad.gguf", "bad.safetensors")
    (error,) = safeload.check("bad.gguf").errors
    assert (error.code, error.tensor) == ("gguf.shape", name)


def test_info_and_check_know_the_architecture():
    convert(model("sd1"), quantize="q4_k_m")
    assert safeload.info("x.gguf").model == "sd1, diffusion model"
    report = safeload.check("x.gguf")
    assert (report.errors, [note.code for note in report.notes]) == ([], ["gguf.unchecked"])
    gguf.save_file({"x.weight": np.ones((2, 2), np.float32)}, "odd.gguf", {"general.architecture": "flux"})
    assert "gguf.names" in {warning.code for warning in safeload.check("odd.gguf").warnings}
