"""Tensors with Python attributes, as torch.save writes them: read like torch.load(weights_only=True)."""

import pytest

torch = pytest.importorskip("torch")

from builders.inside import torch_globals  # noqa: E402

import safeload  # noqa: E402


def tagged(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def state():
    module = torch.nn.Linear(3, 2)
    module.mean = torch.nn.Buffer(torch.arange(6.0).reshape(2, 3))
    return {
        **module.state_dict(keep_vars=True),
        "temporary": torch.nn.Buffer(torch.ones(2, dtype=torch.bfloat16), persistent=False),
        "parameter": tagged(torch.nn.Parameter(torch.arange(3.0)), tag="x", sizes=[1, {"a": (2,)}]),
        "plain": tagged(torch.arange(4), note="n", scale=torch.ones(2)),
        "view": tagged(torch.arange(12.0).reshape(3, 4).t()[1:], axis=1),
        "empty": tagged(torch.empty(0, 3), none=None),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_attributes_leave_the_values_as_torch_reads_them(zipped, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(state(), path, _use_new_zipfile_serialization=zipped)
    with safeload.open(path) as opened:
        theirs = torch.load(path, weights_only=True)
        assert all(opened.named_globals.values())
        assert "torch._tensor._rebuild_from_type_v2" in opened.named_globals
        assert list(opened) == list(theirs)
        for name, array in opened.load().items():
            want = theirs[name].detach()
            assert opened.tensors[name].shape == tuple(want.shape)
            assert torch.equal(torch.from_numpy(array.astype("float64")), want.double()), name
    assert safeload.scan(path).verdict == "harmless"


def test_every_attribute_that_torch_implements_itself_is_listed():
    classes = torch.Tensor.__mro__
    own = {name: next(cls.__dict__[name] for cls in classes if name in cls.__dict__) for name in dir(torch.Tensor)}
    assert {name for name, value in own.items() if hasattr(type(value), "__set__")} <= torch_globals.TENSOR_OWN
