import dataclasses

import pytest

from theodolite.anatomy import Part
from theodolite.anatomy.names import MANY, ranges
from theodolite.anatomy.part import fold

WEIGHT = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))


def weight(name, block=None, **changes):
    return dataclasses.replace(WEIGHT, name=name, block=block, **changes)


def patterns(parts):
    return [one.pattern for one in fold(parts)]


def test_equal_blocks_fold_and_keep_the_order():
    parts = [
        weight("in"),
        *(weight(f"b.{i}.{name}", i) for i in range(3) for name in ("q", "k")),
        weight("out"),
    ]
    assert patterns(parts) == ["in", "b.*.q", "b.*.k", "out"]
    assert [one.blocks for one in fold(parts)] == ["", "0–2", "0–2", ""]


def test_nothing_is_lost():
    parts = [weight(f"b.{i}.{name}.{j}", i) for i in range(3) for name in ("q", "k") for j in range(5)]
    assert sorted(part.name for one in fold(parts) for part in one.parts) == sorted(p.name for p in parts)


def test_a_difference_in_anything_but_the_block_keeps_them_apart():
    parts = [weight("b.0.w", 0), weight("b.1.w", 1, shape=(8, 16)), weight("b.2.w", 2)]
    assert [(one.pattern, one.blocks) for one in fold(parts)] == [("b.*.w", "0, 2"), ("b.1.w", "1")]


def test_two_of_a_kind_in_one_block_are_told_apart_but_many_are_not():
    two = [weight(f"b.{i}.mlp.{j}.w", i) for i in range(3) for j in (0, 2)]
    assert patterns(two) == ["b.*.mlp.0.w", "b.*.mlp.2.w"]
    many = [weight(f"b.{i}.experts.{j}.w", i) for i in range(3) for j in range(MANY)]
    assert patterns(many) == ["b.*.experts.*.w"]


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([3], "3"), ([2, 0, 1], "0–2"), ([0, 2], "0, 2"), ([1, 3, 5, 7, 9], "1, 3, …, 9")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text
