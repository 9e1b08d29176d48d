"""Dicts of names and nested dicts, in both directions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import safeload

pytestmark = pytest.mark.no_core

ARRAY = np.ones(2, np.float32)


def test_values_are_the_same_objects_in_the_same_order():
    weights = {"h.1.w": ARRAY, "h.0.w": np.zeros(1), "norm": np.ones(1)}
    tree = safeload.nest(weights)
    assert tree["h"]["1"]["w"] is ARRAY
    assert list(tree["h"]) == ["1", "0"]
    assert list(safeload.flatten(tree)) == list(weights)


parts = st.text("ab0/", min_size=1, max_size=3)


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(parts, inner, min_size=1, max_size=3), max_leaves=8))
def test_nesting_what_was_flattened_gives_the_same_tree(tree):
    tree = tree if isinstance(tree, dict) else {"x": tree}
    assert safeload.nest(safeload.flatten(tree)) == tree


def test_a_checkpoint_nests_and_another_separator_is_for_flax(tmp_path):
    save_file({"params/dense/kernel": ARRAY}, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        assert safeload.nest(opened, sep="/")["params"]["dense"]["kernel"].tolist() == [1, 1]


def test_lists_tuples_and_numbers_are_parts_of_names():
    tree = {"layers": [{"w": 1}, ({"b": 2},)], "x": {3: 4}, "none": {}, "empty": []}
    assert safeload.flatten(tree) == {"layers.0.w": 1, "layers.1.0.b": 2, "x.3": 4}


def test_a_tree_deeper_than_pythons_stack():
    tree = {"x": 1}
    for _ in range(20_000):
        tree = {"a": tree}
    ((name, value),) = safeload.flatten(tree, sep="/").items()
    assert value == 1
    assert name.count("/") == 20_000
    assert safeload.flatten(safeload.nest({name: 1}, sep="/"), sep="/") == {name: 1}
    while "a" in tree:  # freeing it all at once would recurse in C
        tree = tree.pop("a")


@pytest.mark.parametrize(
    "weights",
    [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}, {"a": {"x": 1}, "a.b": 2}, {"a.b": 2, "a": {}}, {"a.b.c": 1, "a.b": 2}],
    ids=str,
)
def test_a_name_that_is_the_beginning_of_another_is_refused(weights):
    with pytest.raises(ValueError, match=r"tensor 'a(\.b)?' would also be the dict that holds 'a\.b(\.c)?'"):
        safeload.nest(weights)


def test_wrong_trees_are_told():
    loop = {"a": {}}
    loop["a"]["b"] = loop
    with pytest.raises(ValueError, match=r"'a\.b' contains itself"):
        safeload.flatten(loop)
    with pytest.raises(ValueError, match=r"two values would have the name 'a\.b'"):
        safeload.flatten({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(TypeError, match=r"keys in 'a' must be str or int, got True"):
        safeload.flatten({"a": {True: 1}})
    with pytest.raises(TypeError, match="tree must be a mapping of names to arrays and nested dicts, got list"):
        safeload.flatten([1])
    with pytest.raises(TypeError, match="weights must be a mapping"):
        safeload.nest([1])
    for function in (safeload.nest, safeload.flatten):
        with pytest.raises(ValueError, match="sep must be a nonempty str"):
            function({"a": 1}, sep="")
