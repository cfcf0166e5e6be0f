"""Three samples without a common example, and the better of two models."""

from __future__ import annotations

import pytest
import torch

from theodolite import UseError
from theodolite.core.batches import Batch
from theodolite.growing import Splits, certificate, check_disjoint, split


def batch(*numbers: float) -> Batch:
    """One example for each number, twice it the target."""
    examples = torch.tensor(numbers)[:, None]
    return examples, 2 * examples


def examples(batches: tuple[Batch, ...]) -> list[float]:
    for inputs, targets in batches:
        assert torch.equal(targets, 2 * inputs)  # an example keeps its target
    return [one for inputs, _ in batches for one in inputs.flatten().tolist()]


def test_a_sample_is_cut_by_example() -> None:
    batches = [batch(*range(7)), batch(*range(7, 10)), batch(*range(10, 20))]
    found = split(batches, (0.4, 0.3, 0.3))
    assert examples(found.estimate) == list(range(8))
    assert examples(found.choose) == list(range(8, 14))
    assert examples(found.certify) == list(range(14, 20))
    check_disjoint(found)


def test_a_seed_draws_where_an_example_goes() -> None:
    batches = [batch(*range(50)), batch(*range(50, 100))]
    found, again, other = (split(batches, seed=seed) for seed in (1, 1, 2))
    assert sorted(examples(found.estimate) + examples(found.choose) + examples(found.certify)) == list(
        range(100)
    )
    assert examples(found.certify) == examples(again.certify) != examples(other.certify)
    assert min(examples(found.certify)) < 50  # without a seed they are the last
    check_disjoint(found)


def test_an_example_that_comes_again_is_kept() -> None:
    found = split([batch(1, 2, 1, 3), batch(4, 2, 5, 6)])
    assert [examples(part) for part in (found.estimate, found.choose, found.certify)] == [
        [1, 2, 1, 3],
        [4, 2],
        [5, 6],
    ]
    check_disjoint(found)  # 2 is in two splits, as draws fall
    assert " ".join(str(split([batch(1, 2, 3, 4, 5, 6, 2, 7)])).split()).endswith(
        "2 to certify (1 of these have an input that is also in another split)"
    )


def test_no_gain_is_certified_where_the_input_that_loses_comes_most_often() -> None:
    # 0 has a share of 0.9 and loses 0.5, any other input gains 0.5: −0.4 in the mean
    for seed in range(10):
        drawn = torch.where(torch.rand(2000) < 0.9, 0, torch.randint(1, 100_000, (2000,)))
        found = split((drawn[:, None], drawn), seed=seed)
        check_disjoint(found)
        gains = torch.cat([torch.where(inputs[:, 0] == 0, -0.5, 0.5) for inputs, _ in found.certify])
        certified = certificate(gains, torch.zeros_like(gains), bound=0.5)
        assert len(gains) == 500
        assert certified.harms
        assert certified.lower < -0.4 < certified.upper


def test_a_sample_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UseError, match="each of 8 examples occurs 2 times"):
        split([batch(*range(8)), batch(*range(8))])
    inputs = torch.arange(8.0).repeat(2)[:, None]
    assert "16" not in str(split((inputs, torch.arange(16))))  # with other targets it is measured twice


def test_inputs_by_name_and_batches_of_other_lengths() -> None:
    def named(length: int) -> Batch:
        tokens = torch.arange(4 * length).reshape(4, length)
        return {"input_ids": tokens, "positions": torch.arange(length)}, tokens

    found = split([named(6), named(9)])
    assert [inputs["input_ids"].shape for inputs, _ in found.estimate] == [(4, 6)]
    assert [inputs["input_ids"].shape for inputs, _ in found.certify] == [(2, 9)]
    assert [inputs["positions"].shape for inputs, _ in found.certify] == [(9,)]


def test_overlap_is_refused_and_named() -> None:
    splits = Splits([batch(1, 2, 3)], [batch(4, 5)], [batch(6, 7), batch(8, 3, 2)])
    with pytest.raises(
        UseError, match=r"2 of 5 are shared \(example 2 of estimate is example 3 of certify; example 1"
    ):
        check_disjoint(splits)
    with pytest.raises(UseError, match="to choose and to certify overlap"):
        check_disjoint(Splits([batch(1)], [batch(2, 3)], [batch(3, 4)]))
    check_disjoint(Splits([batch(1, 1)], [batch(2, 2)], [batch(3, 4, 3)]))  # independent draws repeat


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.5, 0.5), (1.0, 0.0, 0.0), (0.98, 0.01, 0.01)])
def test_a_split_without_examples_is_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(UseError, match="shares"):
        split([batch(*range(10))], shares)
