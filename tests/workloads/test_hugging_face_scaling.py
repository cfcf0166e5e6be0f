"""Lists with an item for each layer, and shared heads, at other sizes."""

from __future__ import annotations

import pytest

from theodolite.workloads.configs import adapt
from theodolite.workloads.hugging_face import share_heads


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 12, 40])
def test_the_same_list_at_its_own_depth_is_unchanged_and_every_depth_is_filled(depth: int) -> None:
    dense_first = ["dense"] + ["sparse"] * (depth - 1)
    assert adapt(dense_first, depth) == dense_first
    assert len(adapt(["a", "b", "c", "c", "c"], depth)) == depth


def test_a_pattern_keeps_its_proportions() -> None:
    five_to_one = (["sliding"] * 5 + ["full"]) * 8
    assert adapt(five_to_one, 12) == (["sliding"] * 5 + ["full"]) * 2
    assert adapt(five_to_one, 4) == ["sliding"] * 3 + ["full"]


def test_what_is_first_and_last_stays_so() -> None:
    hybrid = ["first", "middle", "middle", "other", "middle", "last"]
    for depth in range(2, 20):
        adapted = adapt(hybrid, depth)
        assert (adapted[0], adapted[-1]) == ("first", "last")


@pytest.mark.parametrize("new_heads", range(1, 33))
def test_heads_can_always_be_shared_equally_and_never_more_than_in_proportion(new_heads: int) -> None:
    shared = share_heads(4, heads=16, new_heads=new_heads)
    assert new_heads % shared == 0
    assert shared <= max(1, new_heads / 4)
    if new_heads % 4 == 0:
        assert shared == new_heads // 4
