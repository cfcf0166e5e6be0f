"""Sizes: their order, their text and their JSON, with and without a batch and a number of tokens."""

import json
import random

import pytest

from theodolite import Size, UseError
from theodolite.core.files import plain, read_dataclass
from theodolite.core.size import rounded


def test_sizes_are_ordered_by_width_depth_batch_and_tokens_and_none_comes_first():
    ordered = [
        Size(8, 1),
        Size(8, 1, tokens=5),
        Size(8, 1, batch=2),
        Size(8, 1, batch=2, tokens=5),
        Size(8, 1, batch=16),
        Size(8, 2),
        Size(64, 1),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled) == ordered
    assert Size(8, 1) < Size(8, 1, batch=1)
    assert Size(8, 1, batch=4) >= Size(8, 1, batch=4)
    with pytest.raises(TypeError):
        assert Size(8, 1) < (8, 2)


def test_sizes_of_one_network_are_told_apart_by_what_they_are_trained_on():
    one, other = Size(8, 1, batch=4), Size(8, 1, batch=8)
    assert one != other
    assert one.network == other.network == Size(8, 1)
    assert len({one, other, Size(8, 1), one.network}) == 3
    assert Size(8, 1, tokens=2_000_000_000) == Size(8, 1, tokens=2e9)
    assert isinstance(Size(8, 1, tokens=2e9).tokens, int)


def test_at_changes_what_is_given_and_keeps_the_rest():
    size = Size(8, 1, batch=4, tokens=100)
    assert size.at(batch=8) == Size(8, 1, batch=8, tokens=100)
    assert size.at(tokens=7) == Size(8, 1, batch=4, tokens=7)
    assert size.at() == size


@pytest.mark.parametrize("size", [Size(8, 1), Size(8, 1, batch=4), Size(8, 1, tokens=9), Size(8, 1, 4, 9)])
def test_what_a_size_does_not_say_is_in_no_text_and_no_file(size):
    assert eval(repr(size), {"Size": Size}) == size
    content = json.loads(json.dumps(plain(size)))
    said = {name: value for name, value in vars(size).items() if value is not None}
    assert content == said
    assert read_dataclass(Size, content, "the size") == size
    assert "None" not in repr(size)
    assert "None" not in str(size)


def test_a_file_may_say_null_but_needs_width_and_depth():
    assert read_dataclass(Size, {"width": 8, "depth": 1, "batch": None}, "it") == Size(8, 1)
    with pytest.raises(UseError, match="it has no depth"):
        read_dataclass(Size, {"width": 8, "batch": 4}, "it")
    with pytest.raises(UseError, match="it: batch is 'many' where a whole number belongs"):
        read_dataclass(Size, {"width": 8, "depth": 1, "batch": "many"}, "it")


@pytest.mark.parametrize("name", ["batch", "tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", float("nan"), float("inf")])
def test_a_batch_or_a_number_of_tokens_that_is_no_count_is_refused_by_name(name, value):
    with pytest.raises(UseError, match=rf"^{name} is .*: give a positive whole number, for example"):
        Size(8, 1, **{name: value})


@pytest.mark.parametrize("given, least_refused", [("batch", 2**40 + 1), ("tokens", 2**62 + 1)])
def test_counts_beyond_reason_are_refused(given, least_refused):
    assert getattr(Size(8, 1, **{given: least_refused - 1}), given) == least_refused - 1
    with pytest.raises(UseError, match=f"{given} is {least_refused}: the largest"):
        Size(8, 1, **{given: least_refused})


@pytest.mark.parametrize(
    "count, text",
    [
        (1, "1"),
        (9999, "9999"),
        (10_000, "10k"),
        (999_000, "999k"),
        (1_000_000, "1M"),
        (20_500_000, "20.5M"),
        (999_000_000, "999M"),
        (1_000_000_000, "1B"),
        (10**13, "10T"),
    ],
)
def test_large_counts_are_told_in_three_digits(count, text):
    assert rounded(count) == text
