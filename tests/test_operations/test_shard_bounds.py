"""Shards hold as many tensors as fit, in order."""

import pytest
from builders.inside import shard_bounds
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.inner


def one_by_one(sizes, limit):
    shards = [[]]
    for size in sizes:
        if shards[-1] and sum(shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append(size)
    return shards


@settings(deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(0, 1 << 55), max_size=30), st.integers(1, 20) | st.integers(1, 1 << 56))
def test_each_shard_takes_tensors_up_to_the_limit(sizes, limit):
    bounds = shard_bounds(sizes, limit)
    assert [sizes[rows] for rows in bounds.values()] == one_by_one(sizes, limit)
    names = [f"model-{k + 1:05}-of-{len(bounds):05}.safetensors" for k in range(len(bounds))]
    assert list(bounds) == (names if len(bounds) > 1 else ["model.safetensors"])
