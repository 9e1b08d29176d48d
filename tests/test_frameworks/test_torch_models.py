"""Models saved and loaded with one copy of each parameter; the files and the results are upstream's."""

import errno
import json
import os
import random
import shutil

import pytest
from builders.paths import TESTS
from builders.torch_tensors import bits

torch = pytest.importorskip("torch")

import safetensors.torch as upstream  # noqa: E402

import safeload  # noqa: E402
import safeload.torch as ours  # noqa: E402
from safeload import FormatError, SafetensorError, UnsupportedError  # noqa: E402
from safeload.numpy import load_file as arrays_of  # noqa: E402

nn = torch.nn


class Transformer(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 4))

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class Views(nn.Module):
    """A parameter, parts of it, and its transpose."""

    def __init__(self, names=("whole", "second", "last", "turned")):
        super().__init__()
        whole = torch.randn(8, 6)
        parts = {"whole": whole, "second": whole[1:2], "last": whole[4:], "turned": whole.T}
        for name in names:
            self.register_buffer(name, parts[name])


class Flattened(nn.Module):
    """An LSTM whose weights are parts of one storage, as on a GPU."""

    def __init__(self, whole=False):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        sizes = [weight.numel() for weight in self.lstm.parameters()]
        flat = torch.randn(sum(sizes))
        at = 0
        for weight, size in zip(self.lstm.parameters(), sizes, strict=True):
            weight.data = flat[at : at + size].view(weight.shape)
            at += size
        if whole:
            self.register_buffer("flat", flat)


def tied_chain():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "cab"})
    model["a"].weight = model["b"].weight = model["c"].weight
    return model


MODELS = {
    "transformer": Transformer,
    "untied": lambda: Transformer(tied=False),
    "lstm": lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True),
    "chain": tied_chain,
    "normalised": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "half": lambda: Transformer().to(torch.bfloat16),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "empty": nn.Module,
    "whole and last": lambda: Views(("whole", "last")),
}
# What upstream refuses.
MORE = {
    "lstm, flat": Flattened,
    "lstm, flat, with the whole": lambda: Flattened(whole=True),
    "lstm, flat, tied": lambda: nn.ModuleDict({"a": (lstm := Flattened()), "b": lstm}),
    "views": Views,
    "two views": lambda: Views(("whole", "second", "last")),
    "transpose": lambda: Views(("whole", "turned")),
}


def state(model):
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def scrambled(make):
    """A second model with other values, in the same layout."""
    torch.manual_seed(99)
    model = make()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_makes_upstreams_file_and_comes_back(name, tmp_path):
    model = MODELS[name]()
    ours.save_model(model, tmp_path / "mine")
    upstream.save_model(model, tmp_path / "theirs")
    mine, theirs = arrays_of(tmp_path / "mine"), arrays_of(tmp_path / "theirs")
    assert set(mine) == set(theirs)
    with ours.safe_open(tmp_path / "mine", "pt") as a, ours.safe_open(tmp_path / "theirs", "pt") as b:
        assert a.metadata() == b.metadata()
    for path in ("mine", "theirs"):
        for load in (ours.load_model, upstream.load_model):
            again = scrambled(MODELS[name])
            assert load(again, tmp_path / path) == (set(), [])
            assert state(again) == state(model)


@pytest.mark.parametrize("name", MORE)
def test_a_model_that_upstream_refuses_is_saved_once_and_comes_back(name, tmp_path):
    model = MORE[name]()
    with pytest.raises(RuntimeError):
        upstream.save_model(model, tmp_path / "theirs")
    ours.save_model(model, tmp_path / "mine")
    nbytes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.state_dict().values()
    }
    assert sum(array.nbytes for array in arrays_of(tmp_path / "mine").values()) == sum(nbytes.values())
    again = scrambled(MORE[name])
    assert ours.load_model(again, tmp_path / "mine") == (set(), [])
    assert state(again) == state(model)


def test_what_a_loaded_transformer_says():
    tokens = torch.arange(12).reshape(2, 6)
    model = Transformer().eval()
    again = Transformer().eval()
    again.load_state_dict(ours.load(ours.save({n: t.clone() for n, t in model.state_dict().items()})))
    assert torch.equal(model(tokens), again(tokens))
    assert again.head.weight is again.embed.weight


def test_a_state_dict_is_assigned_without_a_copy(tmp_path):
    model = Transformer(tied=False)
    ours.save_file(model.state_dict(), tmp_path / "x")
    with torch.device("meta"):
        again = Transformer(tied=False)
    tensors = ours.load_file(tmp_path / "x")
    again.load_state_dict(tensors, assign=True)
    assert again.head.weight.data_ptr() == tensors["head.weight"].data_ptr()
    torch.optim.SGD(again.parameters(), 0.1)
    again(torch.arange(6).reshape(1, 6)).sum().backward()
    torch.optim.SGD(again.parameters(), 0.1).step()
    assert state(model)["head.weight"] == bits(ours.load_file(tmp_path / "x")["head.weight"])


def both(call):
    """The outcome of upstream's function and of ours on models of their own."""
    results = []
    for module in (upstream, ours):
        try:
            result = call(module)
        except Exception as error:
            result = type(error), str(error)
        results.append(result)
    return results


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unexpected_names_are_upstreams(strict, tmp_path):
    ours.save_file({"weight": torch.ones(2, 2), "extra": torch.ones(1), "other": torch.ones(1)}, tmp_path / "x")
    theirs, mine = both(lambda module: module.load_model(nn.Linear(2, 2), tmp_path / "x", strict))
    assert theirs == mine
    assert (mine[0] is RuntimeError) if strict else mine == ({"bias"}, ["extra", "other"])
    theirs, mine = both(lambda module: module.load_model(nn.Linear(3, 2), tmp_path / "x", strict))
    assert theirs == mine
    assert mine[0] is RuntimeError


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_with_both_names_of_a_tied_parameter(strict, tmp_path):
    state = {name: tensor.clone() for name, tensor in Transformer().state_dict().items()}
    ours.save_file(state, tmp_path / "x")
    theirs, mine = both(lambda module: module.load_model(Transformer(), tmp_path / "x", strict=strict))
    assert theirs == mine


@pytest.mark.parametrize("keep", ["embed.weight", "head.weight"])
def test_either_name_of_a_tied_parameter_is_enough(keep, tmp_path):
    model = Transformer()
    drop = ({"embed.weight", "head.weight"} - {keep}).pop()
    ours.save_file({name: tensor for name, tensor in model.state_dict().items() if name != drop}, tmp_path / "x")
    again = scrambled(Transformer)
    assert ours.load_model(again, tmp_path / "x", backend="pread") == (set(), [])
    assert state(again) == state(model)


def test_metadata_of_the_caller_is_kept_and_left_alone(tmp_path):
    metadata = {"format": "pt", "head.weight": "mine"}
    ours.save_model(Transformer(), tmp_path / "x", metadata)
    assert metadata == {"format": "pt", "head.weight": "mine"}
    with ours.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == metadata
    ours.save_model(Transformer(), tmp_path / "x")
    with ours.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"head.weight": "embed.weight"}
    with pytest.raises(TypeError, match="metadata"):
        ours.save_model(Transformer(), tmp_path / "x", ["a"])


def test_a_layout_is_refused_on_request(tmp_path):
    model = MODELS["channels last"]()
    with pytest.raises(ValueError, match=r"'weight' is not contiguous.*force_contiguous=True"):
        ours.save_model(model, tmp_path / "x", force_contiguous=False)
    ours.save_model(model, tmp_path / "x", force_contiguous=True)


def test_models_that_cannot_be_saved_or_loaded(tmp_path):
    with pytest.raises(NotImplementedError, match="'weight'"):
        ours.save_model(nn.Linear(2, 2).to("meta"), tmp_path / "x")

    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(ValueError, match="_extra_state"):
        ours.save_model(Extra(), tmp_path / "x")
    overlapping = nn.Module()
    whole = torch.randn(10)
    overlapping.register_buffer("a", whole[:6])
    overlapping.register_buffer("b", whole[4:])
    with pytest.raises(RuntimeError, match=r"none of 'a', 'b' covers all of their shared memory.* 40 bytes"):
        ours.save_model(overlapping, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    (tmp_path / "x").write_bytes(b"\xff" * 40)
    with pytest.raises(FormatError):
        ours.load_model(nn.Linear(2, 2), tmp_path / "x")


def test_names_of_a_file_reach_a_message_without_control_characters(tmp_path):
    ours.save_file({f"\x1b[2J{k}": torch.ones(1) for k in range(1000)}, tmp_path / "x")
    with pytest.raises(RuntimeError, match="and 900 more") as caught:
        ours.load_model(nn.Linear(2, 2), tmp_path / "x")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("seed", range(100))
def test_shared_names_are_found_as_upstream_finds_them(seed):
    rng = random.Random(seed)
    wholes = [torch.zeros(rng.randrange(1, 12)) for _ in range(3)]
    tensors = {}
    for _ in range(rng.randrange(1, 8)):
        whole = rng.choice(wholes)
        a, b = sorted(rng.choices(range(len(whole) + 1), k=2))
        tensors["".join(rng.choices("abcdef", k=3))] = whole if rng.random() < 0.5 else whole[a:b]
    assert sorted(map(sorted, ours._find_shared_tensors(tensors))) == sorted(
        map(sorted, upstream._find_shared_tensors(tensors))
    )
    for name, tensor in tensors.items():
        assert ours._end_ptr(tensor) == upstream._end_ptr(tensor), name
        assert ours._is_complete(tensor) == upstream._is_complete(tensor)
        assert ours.storage_ptr(tensor) == upstream.storage_ptr(tensor)
        assert ours.storage_size(tensor) == upstream.storage_size(tensor)
    options = {
        "preferred_names": rng.sample(sorted(tensors), rng.randrange(len(tensors))),
        "discard_names": ["abc", "d"],
    }
    try:
        want = upstream._remove_duplicate_names(tensors, **options)
    except RuntimeError:
        return  # we may find more to keep
    mine = ours._remove_duplicate_names(tensors, **options)
    assert {name: sorted(group) for name, group in want.items()} == mine


# ---- folders ----


def write_shards(folder, tensors, shards=2):
    """A folder as transformers writes it."""
    folder.mkdir()
    names = sorted(tensors)
    files = {f"model-{k + 1:05}-of-{shards:05}.safetensors": names[k::shards] for k in range(shards)}
    for file, own in files.items():
        ours.save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def untied():
    return {name: tensor.clone() for name, tensor in Transformer(tied=False).state_dict().items()}


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_a_folder_of_shards_is_loaded(backend, untied, tmp_path):
    folder = write_shards(tmp_path / "model", untied)
    for path in (folder, str(folder) + "/", os.fsencode(folder), folder / "model.safetensors.index.json"):
        model = Transformer(tied=False)
        assert ours.load_model(model, path, backend=backend) == (set(), [])
        assert state(model) == all_bits(untied)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "any.gguf"])
def test_a_folder_of_any_format_is_loaded(file, tmp_path):
    model, again = nn.Linear(4, 3), nn.Linear(4, 3)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if file.endswith("bin"):
        torch.save(tensors, tmp_path / file)
    elif file.endswith("safetensors"):
        ours.save_model(model, tmp_path / file)
    else:
        safeload.convert({name: tensor.numpy() for name, tensor in tensors.items()}, tmp_path / file)
    assert ours.load_model(again, tmp_path) == (set(), [])
    assert state(again) == state(model)


@pytest.mark.parametrize("strict", [True, False])
def test_names_and_shapes_of_a_folder_are_compared_as_those_of_a_file(strict, tmp_path):
    tensors = {"weight": torch.ones(2, 2), "extra": torch.ones(1), "other": torch.ones(1)}
    folder = write_shards(tmp_path / "model", tensors)
    ours.save_file(tensors, tmp_path / "x")

    def outcome(path, rows):
        try:
            return ours.load_model(nn.Linear(2, rows), path, strict)
        except RuntimeError as error:
            return str(error).replace(f" from {folder}", "")

    for rows in (2, 3):
        assert outcome(folder, rows) == outcome(tmp_path / "x", rows)
    if strict:
        with pytest.raises(RuntimeError) as caught:
            ours.load_model(nn.Linear(2, 2), folder)
        assert str(caught.value) == (
            f"Error(s) in loading state_dict for Linear from {folder}:\n"
            '    Missing key(s) in state_dict: "bias"\n'
            '    Unexpected key(s) in state_dict: "extra", "other"'
        )


@pytest.mark.parametrize("keep", ["embed.weight", "head.weight"])
def test_a_folder_with_either_name_of_a_tied_parameter(keep, tmp_path):
    model = Transformer()
    drop = ({"embed.weight", "head.weight"} - {keep}).pop()
    folder = write_shards(tmp_path / "model", {name: x for name, x in model.state_dict().items() if name != drop})
    again = scrambled(Transformer)
    assert ours.load_model(again, folder) == (set(), [])
    assert state(again) == state(model)


def test_a_folder_with_both_names_of_a_tied_parameter_is_loaded_if_they_agree(untied, tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        untied["head.weight"] = untied["embed.weight"] = untied["embed.weight"].to(dtype)
        untied["head.weight"] = untied["head.weight"].clone()
        folder = write_shards(tmp_path / str(dtype), untied)
        model = Transformer()
        assert ours.load_model(model, folder) == (set(), [])
        assert torch.equal(model.head.weight, untied["embed.weight"].to(torch.float32))
    untied["head.weight"] = untied["head.weight"].to(torch.float32) + 1
    folder = write_shards(tmp_path / "other", untied)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "head.weight"'):
        ours.load_model(Transformer(), folder)
    assert ours.load_model(Transformer(), folder, strict=False) == (set(), ["head.weight"])


@pytest.mark.parametrize("folder", [True, False])
def test_tensors_take_the_dtype_of_the_parameters(folder, untied, tmp_path):
    halves = {name: x.to(torch.float16) if x.is_floating_point() else x for name, x in untied.items()}
    path = write_shards(tmp_path / "x", halves) if folder else tmp_path / "x"
    if not folder:
        ours.save_file(halves, path)
    for dtype in (None, "bfloat16", torch.float64):
        model = Transformer(tied=False)
        assert ours.load_model(model, path, dtype=dtype) == (set(), [])
        for name, parameter in model.state_dict().items():
            assert parameter.dtype == untied[name].dtype
            stored = halves[name]
            if dtype == "bfloat16" and stored.is_floating_point():
                stored = stored.to(torch.bfloat16)
            assert torch.equal(parameter, stored.to(parameter.dtype)), name


def test_quantized_weights_of_a_folder_are_dequantized(tmp_path):
    folder = tmp_path / "q"
    shutil.copytree(TESTS / "data" / "quantized" / "ct_pack_w4_g32_sym", folder)
    weights = ours.load_checkpoint(folder)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            for name, tensor in weights.items():
                inner = self
                for part in name.split(".")[:-1]:
                    if part not in dict(inner.named_children()):
                        inner.add_module(part, nn.Module())
                    inner = inner.get_submodule(part)
                inner.register_buffer(name.rpartition(".")[2], torch.zeros_like(tensor))

    model = Whole()
    assert ours.load_model(model, folder) == (set(), [])
    assert state(model) == all_bits(weights)
    config = json.loads((folder / "config.json").read_text())
    for field in ("dtype", "torch_dtype"):
        config.pop(field, None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="pass dtype="):
        ours.load_model(Whole(), folder)
    assert ours.load_model(model, folder, dtype="bfloat16") == (set(), [])


def test_folders_that_cannot_be_loaded(untied, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match="empty: no weights here"):
        ours.load_model(Transformer(), tmp_path / "empty")
    folder = write_shards(tmp_path / "model", untied)
    with pytest.raises(UnsupportedError, match="cuda"):
        ours.load_model(Transformer(), folder, device="cuda:99")
    with pytest.raises(SafetensorError, match="backend 'disk' is invalid"):
        ours.load_model(Transformer(), folder, backend="disk")
    model = Transformer(tied=False)
    before = state(model)
    os.remove(folder / "model-00002-of-00002.safetensors")
    with pytest.raises((FormatError, FileNotFoundError), match=r"model-00002-of-00002\.safetensors"):
        ours.load_model(model, folder)
    assert state(model) == before
    for path, error in ((3, TypeError), (None, TypeError), ("a\0b", ValueError)):
        with pytest.raises(error):
            ours.load_model(model, path)


@pytest.mark.parametrize("arguments", [(), ("meta",), ("pt",)], ids=["load_file", "on a device", "safe_open"])
def test_functions_that_read_files_name_the_function_for_folders(arguments, tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        (ours.safe_open if arguments == ("pt",) else ours.load_file)(tmp_path, *arguments)
    assert str(caught.value) == f"Is a directory: {tmp_path}; safeload.torch.load_checkpoint loads folders"
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))
