"""Models saved and loaded with one copy of each parameter; the files and the results are upstream's."""

import random

import pytest
from builders.torch_tensors import bits

torch = pytest.importorskip("torch")

import safetensors.torch as upstream  # noqa: E402

import safeload.torch as ours  # noqa: E402
from safeload import FormatError  # noqa: E402
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
