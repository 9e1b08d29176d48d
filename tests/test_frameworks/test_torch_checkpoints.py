"""safeload.torch.load_checkpoint: every format as tensors, with the true weights of quantized checkpoints."""

import json

import numpy as np
import pytest
from builders.http_server import Server
from builders.paths import DATA
from builders.quantized import FIXTURES, IN_GGUF

torch = pytest.importorskip("torch")

import safeload  # noqa: E402
from safeload import FormatError, TensorNotFoundError, UnsupportedError  # noqa: E402
from safeload.torch import load_checkpoint, save_file  # noqa: E402

WEIGHTS = {
    "w": np.arange(64, dtype=np.float32).reshape(2, 32),
    "half": np.arange(32, dtype=np.float16),
    "scalar": np.array(3.0, np.float32),
}


@pytest.mark.parametrize("suffix", ["safetensors", "gguf", "npz"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_any_format(suffix, dtype, tmp_path):
    weights = {name: array for name, array in WEIGHTS.items() if array.shape or suffix != "gguf"}
    safeload.convert(weights, tmp_path / f"x.{suffix}")
    tensors = load_checkpoint(tmp_path / f"x.{suffix}", dtype=dtype)
    arrays = safeload.load(tmp_path / f"x.{suffix}")
    assert list(tensors) == list(arrays)
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.bfloat16 if dtype else torch.from_numpy(arrays[name]).dtype)
        assert torch.equal(tensor.float(), torch.from_numpy(arrays[name]).float())
        assert tensor.storage_offset() == 0


@pytest.mark.parametrize("file", ["checkpoint.pt", "simple_legacy.pt"])
def test_a_checkpoint_of_torch(file):
    path = DATA / "torch" / file
    tensors, arrays = load_checkpoint(path), safeload.load(path)
    assert list(tensors) == list(arrays)
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == arrays[name].shape
        assert tensor.stride() == tuple(n // arrays[name].itemsize for n in arrays[name].strides) or not tensor.numel()


def test_tensors_that_torch_saved_with_strides_and_shared_storage(tmp_path):
    base = torch.randn(6, 8)
    content = {"t": base.T, "part": base[2:4], "tied": base, "e": torch.ones(1).expand(5), "bf": base.bfloat16().T}
    torch.save(content, tmp_path / "x.pt")
    for options in ({}, {"dtype": "float32"}):
        for name, tensor in load_checkpoint(tmp_path / "x.pt", **options).items():
            assert torch.equal(tensor.float(), content[name].float()), name
            assert tensor.storage_offset() == 0


@pytest.mark.parametrize("name", FIXTURES)
def test_quantized_checkpoints_have_their_true_weights(name):
    path, expected = FIXTURES[name].path, FIXTURES[name].expected()
    tensors = load_checkpoint(path, dtype=torch.float32)
    for key, values in expected.items():
        if tensors[key].is_floating_point():
            np.testing.assert_array_equal(tensors[key].numpy(), values.reshape(tensors[key].shape))
    if name not in IN_GGUF:  # torch has no blocks
        assert load_checkpoint(path, stored=True).keys() == safeload.load(path, stored=True).keys()


@pytest.mark.parametrize("name", ["fp8_block", "gpt_oss", "mlx_affine4_g64", "ct_pack_w4_g32_sym"])
def test_without_a_dtype_packed_tensors_get_that_of_the_config_and_plain_ones_keep_theirs(name):
    path = FIXTURES[name].path
    with safeload.open(path) as checkpoint:
        config = checkpoint.config
        quantized = {key for key, info in checkpoint.tensors.items() if len(info.parts) > 1}
        order = list(checkpoint)
        plain = checkpoint.load(drop=sorted(quantized))
    wanted = getattr(torch, config.get("dtype") or config["torch_dtype"])
    tensors = load_checkpoint(path)
    assert list(tensors) == order
    whole = load_checkpoint(path, dtype=wanted)
    for key in order:
        if key in quantized:
            assert tensors[key].dtype is wanted
            assert torch.equal(tensors[key], whole[key])
        else:
            assert str(tensors[key].dtype).removeprefix("torch.") == plain[key].dtype.name
    meta = load_checkpoint(path, device="meta")
    assert {key: (t.dtype, t.shape) for key, t in meta.items()} == {
        key: (t.dtype, t.shape) for key, t in tensors.items()
    }
    names = order[::-1]
    assert list(load_checkpoint(path, names=names)) == list(load_checkpoint(path, device="meta", names=names)) == names


@pytest.fixture
def fp8(tmp_path):
    """A folder with one fp8 weight, and a function that writes its config."""
    source = FIXTURES["fp8_block"].folder
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}

    def make(**keys):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        return folder

    return make


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float16"}}, "bfloat16"),
        ({"vision_config": {"torch_dtype": "float16"}, "audio_config": {"dtype": "float16"}}, "float16"),
        ({"thinker_config": {"text_config": {"dtype": "float16"}}}, "float16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_where_a_config_names_the_dtype(fp8, keys, dtype):
    path = fp8(**keys)
    with safeload.open(path) as checkpoint:
        name = next(key for key, info in checkpoint.tensors.items() if len(info.parts) > 1)
    assert load_checkpoint(path)[name].dtype is getattr(torch, dtype)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dtype": "auto"},
        {"dtype": None},
        {"dtype": 16},
        {"dtype": {"": "bfloat16"}},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "int8"},
        {"dtype": "x" * 100_000},
        {"dtype": "bfloat16, float16"},
        {"vision_config": {"dtype": "float16"}, "audio_config": {"dtype": "bfloat16"}},
        {"text_config": ["bfloat16"]},
    ],
    ids=lambda keys: str(keys)[:40],
)
def test_where_none_does_the_error_says_pass_dtype(fp8, keys):
    path = fp8(**keys)
    with pytest.raises(UnsupportedError, match="pass dtype=") as caught:
        load_checkpoint(path)
    assert caught.value.tensor is not None
    assert len(str(caught.value)) < 600
    assert load_checkpoint(path, dtype="bf16")
    assert load_checkpoint(path, stored=True)
    with safeload.open(path) as checkpoint:
        plain = [key for key, info in checkpoint.tensors.items() if len(info.parts) == 1]
    assert list(load_checkpoint(path, names=plain)) == plain


def test_quantized_files_without_a_config(tmp_path):
    safeload.convert({"w": np.ones((4, 64), np.float32)}, tmp_path / "x.gguf", quantize="q8_0")
    with pytest.raises(UnsupportedError, match="'w' is stored as Q8_0"):
        load_checkpoint(tmp_path / "x.gguf")
    assert load_checkpoint(tmp_path / "x.gguf", dtype=torch.float16)["w"].dtype is torch.float16
    safeload.convert({"w": np.ones((4, 64), np.float32)}, tmp_path / "x.safetensors", quantize="int8")
    with pytest.raises(UnsupportedError, match="'w' is stored as int8"):
        load_checkpoint(tmp_path / "x.safetensors")
    assert load_checkpoint(tmp_path / "x.safetensors", stored=True)["w"].dtype is torch.int8
    assert (load_checkpoint(tmp_path / "x.safetensors", dtype="f32")["w"] == 1).all()


def test_some_of_the_tensors(tmp_path):
    save_file({f"{part}.{k}": torch.ones(2) for part in "ab" for k in range(3)}, tmp_path / "x")
    load = load_checkpoint
    assert list(load(tmp_path / "x", names=["b.1", "a.0"])) == ["b.1", "a.0"]
    assert list(load(tmp_path / "x", only="a.*", drop="*.1")) == ["a.0", "a.2"]
    assert list(load(tmp_path / "x", drop=["a.*", "b.2"], device="meta")) == ["b.0", "b.1"]
    assert load(tmp_path / "x", names=[]) == {}
    with pytest.raises(ValueError, match="pass only one of them"):
        load(tmp_path / "x", names=["a.0"], only="a.*")
    for options in ({"names": ["c"]}, {"only": "c*"}, {"drop": "c*"}):
        with pytest.raises(TensorNotFoundError):
            load(tmp_path / "x", **options)


def test_the_other_options(tmp_path):
    save_file({"w": torch.ones(1000)}, tmp_path / "x")
    seen = []
    load_checkpoint(tmp_path / "x", dtype="float16", threads=1, progress=lambda *done: seen.append(done))
    assert seen[-1] == (4000, 4000)
    with pytest.raises(FileNotFoundError, match="lora"):
        load_checkpoint(tmp_path / "x", adapters="lora")
    with pytest.raises(UnsupportedError, match="cannot load as int8"):
        load_checkpoint(tmp_path / "x", dtype="int8")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"\xff" * 40)
    with pytest.raises(FormatError):
        load_checkpoint(tmp_path / "bad")


def test_a_folder_of_shards_and_a_list(tmp_path):
    weights = {f"w{k}": np.full(1000, k, np.float32) for k in range(6)}
    safeload.convert(weights, tmp_path / "shards", max_shard_size=9000)
    assert {name: int(x[0]) for name, x in load_checkpoint(tmp_path / "shards").items()} == {
        f"w{k}": k for k in range(6)
    }
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) == 3
    assert len(load_checkpoint(files[:2])) == 4


def test_f4_and_fp8_by_every_format_keep_their_dtype(tmp_path):
    tensors = {
        "f4": torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "f8": torch.ones(3).to(torch.float8_e5m2),
    }
    save_file(tensors, tmp_path / "x")
    loaded = load_checkpoint(tmp_path / "x")
    assert {name: x.dtype for name, x in loaded.items()} == {name: x.dtype for name, x in tensors.items()}
    assert torch.equal(loaded["f4"].view(torch.uint8), tensors["f4"].view(torch.uint8))


def test_a_checkpoint_opens_as_safeload_opens_it(tmp_path):
    """By its nested dict, and around placeholders; an unfit format is refused."""
    path = DATA / "torch" / "checkpoint.pt"
    want = safeload.load(path, root="model_state_dict")
    got = load_checkpoint(path, root="model_state_dict", format="torch")
    assert {name: tensor.numpy().tobytes() for name, tensor in got.items()} == {n: a.tobytes() for n, a in want.items()}
    module = DATA / "torch" / "package-module.pt"
    with pytest.raises(safeload.ForbiddenError):
        load_checkpoint(module)
    got = load_checkpoint(module, unknown_globals="inert")
    assert got.keys() == safeload.load(module, unknown_globals="inert").keys()
    with pytest.raises(safeload.FormatError, match="gguf"):
        load_checkpoint(path, format="gguf")


INDEX = "/model.safetensors.index.json"


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"only": "*norm*"}, {"device": "meta"}])
def test_a_url_of_a_quantized_checkpoint(options):
    """The tensors of the local copy; each file is asked for with the options of the store."""
    pytest.importorskip("urllib3")
    folder = DATA / "quantized" / "fp8_block"
    options = {"dtype": "bfloat16", **options}
    with Server(folder) as server:
        there = load_checkpoint(server.url(INDEX), storage_options={"headers": {"X-Key": "k"}}, **options)
        assert {request.headers.get("x-key") for request in server.requests} == {"k"}
    here = load_checkpoint(folder, **options)
    assert list(there) == list(here)
    for name, tensor in there.items():
        assert (tensor.dtype, tensor.shape, tensor.device) == (here[name].dtype, here[name].shape, here[name].device)
        assert tensor.is_meta or torch.equal(tensor, here[name])


@pytest.mark.parametrize("function", ["load_file", "safe_open"])
def test_drop_ins_take_no_urls(function):
    call = {
        "load_file": lambda url: safeload.torch.load_file(url),
        "safe_open": lambda url: safeload.safe_open(url, "pt"),
    }[function]
    with pytest.raises(FileNotFoundError, match=r'this function reads local files: safeload\.load\("hf://a/b"\)'):
        call("hf://a/b")


def test_the_state_of_a_schedule_opens_beside_tensors(tmp_path):
    """Its milestones are a Counter."""
    path = tmp_path / "t.pt"
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(weight.clone())], 0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]).state_dict()
    torch.save({"w": weight, "sched": schedule, "set": {1, 2}, "complex": 1 + 2j}, path)
    theirs = torch.load(path, weights_only=True)
    with safeload.open(path) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint["w"].tobytes() == theirs.pop("w").numpy().tobytes()
        assert checkpoint.metadata == theirs
