"""What objects show of themselves: one screen in a terminal, a table in a notebook, nothing that a file made up."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import safeload

HOSTILE = {
    "<script>alert(1)</script>": "&lt;script&gt;",
    "\"quotes' & co": "&quot;quotes&#x27; &amp; co",
    "bidi \u202e and \x1b[31m": r"bidi \u202e and \x1b[31m",
    "x" * 1_000_000: "x" * 99 + "…" + "x" * 100,
}


def opened(tmp_path, names):
    save_file({name: np.ones((2, 3), np.float32) for name in names}, tmp_path / "x.safetensors")
    return safeload.open(tmp_path / "x.safetensors")


def test_a_repr_is_one_screen_however_many_tensors(tmp_path):
    with opened(tmp_path, [f"h.{k}.w" for k in range(3000)]) as checkpoint:
        assert re.fullmatch(
            r"<Checkpoint '.*x.safetensors': safetensors, 3,000 tensors, 72,000 bytes>", repr(checkpoint)
        )
        lines = repr(checkpoint.tensors).splitlines()
        assert (lines[0], len(lines), lines[-1]) == ("<3,000 tensors>", 10, "  ... and 2,992 more")
        assert lines[1].endswith("F32 [2, 3]")
        assert len(checkpoint._repr_html_()) < 10_000
        assert checkpoint._repr_html_().count("<tr>") == 21
        assert "... and 2,980 more" in checkpoint.tensors._repr_html_()
    assert "closed" in checkpoint._repr_html_()


def test_dicts_of_quantized_and_of_stacked_tensors_do_not_print_their_values(tmp_path):
    x = {f"h.{k}.w": np.ones((64, 32), np.float32) for k in range(20)}
    shown = repr(safeload.load_quantized(x, "q8_0")).splitlines()
    assert shown[:2] == ["<QuantizedDict: 20 tensors, 20 quantized to q8_0>", "  h.0.w  q8_0 [64, 32]"]
    assert shown[-1] == "  ... and 12 more"
    layout = safeload.Layout("x", [safeload.StackedTensor("w", "h.{}.w")])
    assert repr(safeload.stack(x, layout)) == "<StackedDict: 1 tensor>\n  w  float32 [20, 64, 32]"
    assert repr(safeload.QuantizedDict()) == "<QuantizedDict: 0 tensors>"


@pytest.mark.parametrize("name", HOSTILE, ids=["tag", "quotes", "control", "long"])
def test_what_a_file_says_is_escaped(name, tmp_path):
    with opened(tmp_path, [name]) as checkpoint:
        for html in (checkpoint._repr_html_(), checkpoint.tensors._repr_html_()):
            assert HOSTILE[name] in html
            assert set(re.findall(r"</?(\w+)", html)) == {"div", "table", "thead", "tbody", "tr", "th", "td"}
            assert len(html) < 2000
        assert repr(checkpoint.tensors).isprintable() or repr(checkpoint.tensors).count("\n") == 1
        assert len(repr(checkpoint.tensors)) < 200


def test_descriptions_are_a_dict_that_nobody_changes(tmp_path):
    with opened(tmp_path, ["a", "b"]) as checkpoint:
        infos = checkpoint.tensors
    for change in (
        lambda: infos.__setitem__("c", infos["a"]),
        lambda: infos.__delitem__("a"),
        lambda: infos.update(c=1),
        lambda: infos.__ior__({"c": 1}),
        lambda: infos.pop("a"),
        infos.clear,
        infos.popitem,
        lambda: infos.setdefault("c", 1),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert dict(infos) == infos == pickle.loads(pickle.dumps(infos)) == copy.deepcopy(infos)
    assert list(json.loads(json.dumps(infos))) == ["a", "b"]


def test_keys_are_completed(tmp_path):
    with opened(tmp_path, ["model.b", "model.a"]) as checkpoint:
        assert sorted(checkpoint._ipython_key_completions_()) == ["model.a", "model.b"]


def test_completion_offers_what_is_public():
    offered = {name for name in dir(safeload) if not name.startswith("__")}
    assert offered == {name for name in safeload.__all__ if not name.startswith("_")} | {
        *("cluster", "errors", "gguf", "jax", "moon", "numpy", "plugins", "remote", "torch", "layouts"),
    }
