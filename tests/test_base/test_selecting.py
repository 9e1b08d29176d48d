"""Patterns of names and new names, on their own."""

import io
import re
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import safeload
import safeload.numpy
from safeload import TensorNotFoundError

NAMES = ["h.0.attn.w", "h.0.mlp.w", "h.1.attn.w", "H.1.mlp.w", "norm", "w[0]"]


def file_of(names):
    """A file with one tensor of each name, whose value is its number."""
    return io.BytesIO(safeload.numpy.save({name: np.float32([k]) for k, name in enumerate(names)}))


def select(names, only, drop):
    """The names of the tensors that are loaded, in the order of ``names``."""
    found = safeload.load(file_of(names), only=only, drop=drop)
    assert {name: float(array[0]) for name, array in found.items()} == {name: names.index(name) for name in found}
    return [name for name in names if name in found]


def renamed(names, rename):
    """The new name of each of the tensors of a file, told by their values."""
    target = io.BytesIO()
    safeload.convert(file_of(names), target, rename=rename)
    found = safeload.load(io.BytesIO(target.getvalue()))
    return {names[int(array[0])]: name for name, array in sorted(found.items(), key=lambda item: item[1][0])}


@pytest.mark.parametrize(
    ("only", "drop", "wanted"),
    [
        (None, None, NAMES),
        ("h.*", None, NAMES[:3]),
        (["norm", "h.1.*"], None, ["h.1.attn.w", "norm"]),
        (("*.w",), "*.attn.*", ["h.0.mlp.w", "H.1.mlp.w"]),
        (None, ["h.*", "norm"], ["H.1.mlp.w", "w[0]"]),
        ("h.[01].mlp.w", None, ["h.0.mlp.w"]),
        ("w[[]0]", None, ["w[0]"]),
        (iter(["norm"]), iter(["h.0*"]), ["norm"]),
        ([], None, []),
        ("*", "*", []),
    ],
)
def test_names_match_any_pattern_of_only_and_none_of_drop_in_their_order(only, drop, wanted):
    assert select(NAMES, only, drop) == wanted


names = st.text(st.sampled_from("ab.[]*?!"), max_size=6)


@given(st.lists(names, unique=True), names)
def test_a_pattern_matches_what_fnmatchcase_matches(known, pattern):
    wanted = [name for name in known if fnmatchcase(name, pattern)]
    if wanted:
        assert select(known, pattern, None) == wanted
    else:
        with pytest.raises(TensorNotFoundError, match=f"matches none of {len(known)} name"):
            select(known, pattern, None)


def test_a_pattern_that_matches_nothing_names_itself_and_what_is_near():
    with pytest.raises(
        TensorNotFoundError, match=r"only='h.0.atn.\*' matches none of 6 names; similar names: h.0.attn.w"
    ):
        select(NAMES, ["norm", "h.0.atn.*"], None)
    with pytest.raises(TensorNotFoundError, match=r"drop='nrom' matches none of 6 names; similar names: norm"):
        select(NAMES, None, "nrom")
    with pytest.raises(TensorNotFoundError, match=r"only='\*' matches none of 0 names$"):
        select([], "*", None)


@pytest.mark.parametrize("bad", [[1], [b"h.*"], 3])
def test_a_pattern_is_text(bad):
    with pytest.raises(TypeError):
        select(NAMES, bad, None)


@pytest.mark.parametrize("patterns", [{"only": "*"}, {"drop": "b"}, {}])
@pytest.mark.parametrize("key", [1, None])
def test_keys_that_are_not_text_are_told_by_their_type(patterns, key):
    """Patterns pass them by, so that the error is that of the name."""
    x = np.zeros(2, np.float32)
    with pytest.raises(TypeError, match=f"a tensor name must be str, got {type(key).__name__}"):
        safeload.check({"a": x, "b": x, key: x}, **patterns)


# ---- new names ----


@pytest.mark.parametrize(
    ("rename", "wanted"),
    [
        (None, NAMES),
        ([], NAMES),
        ([(r"^h\.(\d+)", r"layers.\1")], ["layers.0.attn.w", "layers.0.mlp.w", "layers.1.attn.w", *NAMES[3:]]),
        ([("norm", "x"), ("^x$", "y")], [*NAMES[:4], "y", "w[0]"]),
        ({"norm": "final"}, [*NAMES[:4], "final", "w[0]"]),
        (("norm", "final"), [*NAMES[:4], "final", "w[0]"]),
        ([(re.compile("NORM", re.IGNORECASE), lambda match: match[0].upper())], [*NAMES[:4], "NORM", "w[0]"]),
        ([("h.0", "t"), ("t.attn", "h.0.attn")], ["h.0.attn.w", "t.mlp.w", *NAMES[2:]]),
    ],
)
def test_pairs_are_substituted_one_after_the_other(rename, wanted):
    new = renamed(NAMES, rename)
    assert list(new) == NAMES
    assert list(new.values()) == wanted


def test_two_names_may_be_exchanged():
    assert renamed(["a", "b"], [("^a$", "#"), ("^b$", "a"), ("#", "b")]) == {"a": "b", "b": "a"}


@pytest.mark.parametrize("rename", [None, [], [("x", "y")], [("^$", "")], {"a": "b"}])
def test_a_tensor_may_have_an_empty_name(rename):
    assert renamed(["", "norm"], rename)[""] == ""


def test_an_empty_name_may_be_replaced():
    assert renamed(["", "w"], [("^$", "root")]) == {"": "root", "w": "w"}


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ([(r"\.\d+\.", ".")], "tensors 'h.0.attn.w' and 'h.1.attn.w' the same name 'h.attn.w'"),
        ([("norm", "")], "leaves tensor 'norm' without a name"),
        ([("(", "x")], r"'\(' is not a valid regular expression"),
        ([("norm", r"\9")], r"'\\\\9' is not a valid"),
        ([("norm", r"\g<no>")], "is not a valid"),
    ],
)
def test_wrong_pairs_are_told(rename, message):
    with pytest.raises(ValueError, match=message):
        renamed(NAMES, rename)


@pytest.mark.parametrize("bad", [["ab", "c", "d"], [("a",)], [("a", 1)], [(b"a", b"b")], [1]])
def test_anything_but_pairs_is_refused(bad):
    with pytest.raises(TypeError, match=r"rename must be .* pairs"):
        renamed(NAMES, bad)


def test_a_refused_pair_is_shown_as_a_pair():
    with pytest.raises(TypeError, match=r"got \('a', None\)$"):
        renamed(NAMES, ("a", None))
