"""Pickled modules and TorchScript have the names of their `state_dict`, and tensor subclasses give plain tensors."""

import sys
import time
import types
import warnings
import zipfile

import numpy as np
import pytest
from builders.inside import main

import safeload

torch = pytest.importorskip("torch")
nn = torch.nn


class Block(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.register_parameter("absent", None)
        self.register_buffer("mean", torch.rand(width))
        self.register_buffer("cache", torch.rand(width), persistent=False)
        self.register_buffer("nothing", None)
        self.stride = torch.rand(2)  # a plain attribute, as YOLO's
        self.anchors = [torch.rand(2), {"deep": torch.rand(1)}]
        self.config = {"width": width, "names": ["a", "b"]}
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x * self.scale + self.mean)


class Empty(nn.Module):
    pass


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "body": Block(), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["body"]
    return model


def normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))


def frozen():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout()))
    model.requires_grad_(False)
    return model.half()


def deep():
    model = nn.Linear(2, 2)
    for _ in range(60):
        model = nn.Sequential(model)
    return model


def lists():
    model = Empty()
    model.layers = nn.ModuleList([Block(2), nn.Identity(), nn.LSTM(2, 2)])
    model.values = nn.ParameterList([torch.rand(1), torch.rand(2)])
    model.named = nn.ParameterDict({"c": torch.rand(1)})
    return model


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
    "single layer": lambda: nn.Linear(2, 2),
    "own class": Block,
    "tied": tied,
    "weight norm": normed,
    "half and frozen": frozen,
    "deep": deep,
    "lists": lists,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lazy": lambda: nn.Sequential(nn.Embedding(3, 2), nn.GroupNorm(1, 2), nn.PReLU()),
}


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor.detach().numpy())


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_names_are_those_of_state_dict(name, legacy, tmp_path):
    model, path = MODULES[name](), tmp_path / "m.pt"
    torch.save(model, path, _use_new_zipfile_serialization=not legacy)
    same(safeload.load(path, unknown_globals="inert"), model.state_dict())


def test_modules_in_a_dict_have_their_prefix(tmp_path):
    model, ema, path = Block(), Block(), tmp_path / "m.pt"
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.save(
        {"epoch": 3, "model": model, "ema": ema, "optimizer": optimizer.state_dict(), "x": [nn.Linear(1, 1)]}, path
    )
    with safeload.open(path, unknown_globals="inert") as opened:
        wanted = {f"{key}.{name}" for key, one in (("model", model), ("ema", ema)) for name in one.state_dict()}
        assert set(opened) == wanted | {"x.0.weight", "x.0.bias"}
        assert opened.metadata["epoch"] == 3
        assert opened.metadata["model"]["<state>"]["config"] == {"width": 3, "names": ["a", "b"]}
    with safeload.open(path, unknown_globals="inert", root="ema") as opened:
        same(opened.load(), ema.state_dict())


def test_what_state_dict_lacks_is_named(tmp_path, capsys):
    path, target = tmp_path / "m.pt", tmp_path / "m.safetensors"
    model = Block()
    torch.save({"model": model}, path)
    notes = safeload.open(path, unknown_globals="inert").notes
    assert notes == ["left out: 4 tensors that the state dict of its module does not have, such as 'stride'"]
    assert main(["convert", str(path), str(target), "--unknown-globals", "inert", "--root", "model"]) == 0
    out, err = capsys.readouterr()
    assert notes[0] in out
    assert notes[0] in err
    found = safeload.load(target)
    same({name: found[name] for name in model.state_dict()}, model.state_dict())
    restored = Block()
    restored.load_state_dict(safeload.torch.load_file(target))


def test_torchscript(tmp_path):
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
            self.register_buffer("mean", torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.inner:
                x = layer(x)
            return x - self.mean

    model = Scripted().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripts = torch.jit.script(model), torch.jit.trace(model, torch.ones(2, 3))
    for script in scripts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(script, str(tmp_path / "m.pt"))
        got = safeload.load(tmp_path / "m.pt", unknown_globals="inert")
        assert set(got) == set(script.state_dict())
        same(dict(sorted(got.items())), dict(sorted(script.state_dict().items())))


class Attributes(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.inner, self.plain = nn.Linear(2, 2), torch.ones(3)
        self.register_buffer("buffer", torch.zeros(2))
        self.many = [torch.ones(2), torch.ones(3)]

    def forward(self, x):
        return self.inner(x) + self.buffer + self.plain.sum() + self.many[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["none", "deflate", "no sources", "escape", "damaged"])
def test_scripts_show_the_tensors_of_state_dict_only(change, tmp_path):
    script = torch.jit.script(nn.Sequential(Attributes(), nn.ReLU(), Attributes()))
    wanted, path = script.state_dict(), tmp_path / "m.pt"
    torch.jit.save(script, str(path))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            source = name.endswith(".py")
            if source and change == "no sources":
                continue
            if source and change == "escape":
                content = content.replace(b'["buffer", ]', b'["buff\\145r", ]')
            compression = zipfile.ZIP_DEFLATED if source and change == "deflate" else zipfile.ZIP_STORED
            archive.writestr(name, b"\xff(\0" if source and change == "damaged" else content, compression)
    with safeload.open(path, unknown_globals="inert") as opened:
        got = opened.load()
        if change in ("none", "deflate"):
            same(dict(sorted(got.items())), dict(sorted(wanted.items())))
            (note,) = opened.notes
            assert "tensors that the state dict of its module does not have, such as 'plain'" in note
        else:  # nothing says what the attributes are
            assert set(got) == {*wanted, "0.plain", "2.plain"}


def test_a_module_in_a_loop_and_one_that_is_none(tmp_path):
    model, path = nn.Sequential(nn.Linear(2, 2)), tmp_path / "m.pt"
    model.parent = [model]
    model.note = "kept"
    torch.save({"model": model}, path)
    got = safeload.open(path, unknown_globals="inert")
    assert list(got) == ["model.0.weight", "model.0.bias"]
    assert got.metadata["model"]["<state>"]["note"] == "kept"


# ---- subclasses of tensors ----


class Image(torch.Tensor):
    pass


class Tagged(torch.Tensor):
    def __new__(cls, data, tag=""):
        made = data.as_subclass(cls)
        made.tag = tag
        return made


SUBCLASSES = {
    "plain": lambda: torch.rand(3).as_subclass(Image),
    "with attributes": lambda: Tagged(torch.rand(2, 3), "x"),
    "strided": lambda: torch.rand(4, 4).as_subclass(Image).t(),
    "half": lambda: torch.rand(3).half().as_subclass(Image),
    "parameter of it": lambda: nn.Parameter(torch.rand(3).as_subclass(Image)),
    "empty": lambda: torch.rand(0).as_subclass(Image),
    "scalar": lambda: torch.rand(()).as_subclass(Image),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_gives_its_plain_tensor(name, legacy, tmp_path, capsys):
    value, path = SUBCLASSES[name](), tmp_path / "m.pt"
    torch.save({"weight": value, "bias": torch.zeros(3)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(safeload.ForbiddenError):
        safeload.open(path)
    got = safeload.load(path, unknown_globals="inert")
    assert list(got) == ["weight", "bias"]
    np.testing.assert_array_equal(got["weight"], value.detach().as_subclass(torch.Tensor).numpy())
    assert main(["convert", str(path), str(tmp_path / "o.npz"), "--unknown-globals", "inert"]) == 0
    assert not capsys.readouterr().err
    assert list(safeload.open(tmp_path / "o.npz")) == ["weight", "bias"]


def test_parameters_and_buffers_are_plain_tensors(tmp_path):
    value = {"parameter": nn.Parameter(torch.rand(2)), "buffer": nn.Buffer(torch.rand(2))}
    torch.save(value, tmp_path / "m.pt")
    same(safeload.load(tmp_path / "m.pt"), value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(torch.rand(2, 2), torch.rand(2), torch.zeros(2), 0, torch.qint8),
    ],
    ids=["per tensor", "per channel"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_no_array_holds_is_listed(make, tmp_path, capsys):
    path = tmp_path / "m.pt"
    torch.save({"odd": make(), "w": torch.ones(2)}, path)
    with safeload.open(path, unknown_globals="inert") as opened:
        assert "odd" in opened
        assert opened["w"].tolist() == [1, 1]
        with pytest.raises(safeload.UnsupportedError, match="tensor 'odd': quantized qint8 cannot be represented"):
            opened["odd"]
    arguments = ["convert", str(path), str(tmp_path / "o.npz"), "--unknown-globals", "inert"]
    assert main(arguments) == 1
    assert "--drop" in capsys.readouterr().err
    assert main([*arguments, "--drop", "odd*"]) == 0


def test_classes_that_are_gone_do_not_matter(tmp_path):
    """The class is not importable when the file is read, as with YOLO's."""
    module = types.ModuleType("a_model_zoo")
    exec(
        "import torch\nclass Net(torch.nn.Sequential):\n    pass\nclass Weight(torch.Tensor):\n    pass",
        module.__dict__,
    )
    sys.modules["a_model_zoo"] = module
    try:
        model = module.Net(nn.Linear(2, 2))
        torch.save({"model": model, "w": torch.ones(2).as_subclass(module.Weight)}, tmp_path / "m.pt")
    finally:
        del sys.modules["a_model_zoo"]
    got = safeload.load(tmp_path / "m.pt", unknown_globals="inert")
    assert list(got) == ["model.0.weight", "model.0.bias", "w"]


def test_modules_that_share_a_state_are_a_limit(tmp_path):
    """Each of 20,000 modules has 300 members for 9 bytes."""
    body = b"(d"  # the dicts of the state
    parameters = b"(" + b"".join(b"V%d\nN" % k for k in range(300)) + b"d"
    state = b"(V_parameters\n" + parameters + b"V_buffers\n" + body + b"V_modules\n" + body + b"dp1\n0"
    one = b"cnet\nNet\n)R" + b"g1\nb"
    (tmp_path / "m.pkl").write_bytes(b"\x80\x02" + state + b"(" + one * 20_000 + b"l.")
    with pytest.raises(safeload.SafeloadError, match="members of modules when shared states are unfolded"):
        safeload.open(tmp_path / "m.pkl", unknown_globals="inert")


@pytest.mark.parametrize("nested", [False, True])
def test_compiled_modules(nested, tmp_path, monkeypatch):
    place = types.ModuleType("torch._dynamo.eval_frame")  # a stand-in for what takes seconds to import
    methods = {"__module__": place.__name__, "__reduce__": lambda self: (place.OptimizedModule, (self.inner, None))}
    place.OptimizedModule = type("OptimizedModule", (), methods)
    monkeypatch.setitem(sys.modules, place.__name__, place)
    model = place.OptimizedModule()
    inner, path = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), tmp_path / "m.pt"
    model.inner = inner
    torch.save({"model": model} if nested else model, path)
    wanted = {f"_orig_mod.{name}": tensor for name, tensor in inner.state_dict().items()}
    same(safeload.load(path, unknown_globals="inert", root="model" if nested else None), wanted)


@pytest.mark.parametrize("nested", [False, True])
def test_traced_modules(nested, tmp_path):
    inner, path = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), tmp_path / "m.pt"
    model = torch.fx.symbolic_trace(inner)
    torch.save({"model": model} if nested else model, path)
    same(safeload.load(path, unknown_globals="inert", root="model" if nested else None), inner.state_dict())


@pytest.mark.parametrize(
    "function", ["torch._dynamo.eval_frame OptimizedModule", "torch.fx.graph_module reduce_graph_module"]
)
def test_calls_that_share_long_arguments_copy_none(function, tmp_path):
    """A copy of 100,000 arguments for each of 20,000 calls takes minutes."""
    path = tmp_path / "m.pkl"
    name = "c{}\n{}\n".format(*function.split()).encode()
    path.write_bytes(b"\x80\x02(" + b"K\x01" * 100_000 + b"tp1\n0" + b"(" + (name + b"g1\nR") * 20_000 + b"l.")
    began = time.process_time()
    with pytest.raises(safeload.SafeloadError, match="values when shared containers are unfolded"):
        safeload.open(path, unknown_globals="inert")
    assert time.process_time() - began < 20


@pytest.mark.parametrize("value", [nn.LazyLinear(2), torch.empty(2, device="meta")], ids=["lazy", "meta"])
def test_tensors_without_values_are_named(value, tmp_path, capsys):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(1), "odd": value}, path)
    arguments = ["convert", str(path), str(tmp_path / "m.safetensors"), "--unknown-globals", "inert"]
    assert main(arguments) == 1
    assert "has no values" in capsys.readouterr().err
    assert not safeload.check(path).ok if isinstance(value, torch.Tensor) else True
    assert main([*arguments, "--drop", "odd*"]) == 0


SHAPES = {
    "integer": b"K\x05",
    "none": b"N",
    "text": b"X\x02\0\0\0ab",
    "negative": b"(J\xff\xff\xff\xfft",
    "huge": b"(\x8a\x09" + b"\xff" * 8 + b"\x7f\x8a\x09" + b"\xff" * 8 + b"\x7ft",
    "product": b"(" + b"J\0\0\0\x40" * 8 + b"t",
    "list": b"(K\x01l",
    "axes": b"(" + b"K\x01" * 100 + b"t",
    "placeholder": b"cfoo\nbar\n)R",
}


@pytest.mark.parametrize("unknown", ["storage", "dtype"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_unknown_kinds_are_checked(name, unknown, tmp_path):
    storage = "FloatStorage" if unknown == "dtype" else "NoSuchStorage"
    function, dtype = (
        ("_rebuild_tensor_v3", b"ctorch\nnone_such\n") if unknown == "dtype" else ("_rebuild_tensor_v2", b"")
    )
    identity = f"(X\x07\0\0\0storagectorch\n{storage}\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ".encode()
    rest = b"K\0" + SHAPES[name] + b"(K\x01t\x89N" + dtype + b"tRs."
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        pickled = b"\x80\x02}X\x01\0\0\0x" + f"ctorch._utils\n{function}\n(".encode() + identity + rest
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/version", "3\n")
        archive.writestr("m/data/0", bytes(16))
    with pytest.raises(safeload.ForbiddenError):
        safeload.info(path)
    with safeload.open(path, unknown_globals="inert") as opened:
        assert opened.tensors["x"].shape == ((1,) if name == "list" else ())
    assert main(["info", str(path), "--unknown-globals", "inert"]) == 0
