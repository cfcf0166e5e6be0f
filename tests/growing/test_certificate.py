"""A certificate holds as often as it says, and says what it is about."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from theodolite import UseError
from theodolite.growing import Certificate, certificate, clip_from, least_examples
from theodolite.growing.certificate import Method, lower_bound


def skewed(shape: tuple[int, ...], high: float) -> Tensor:
    """Mean 0 on two values: 1 with a probability of `high`, else a little below 0."""
    return torch.where(torch.rand(shape) < high, 1.0, -high / (1 - high)).double()


def heavy(shape: tuple[int, ...]) -> Tensor:
    """Clipped to [−1, 1], symmetric, its tails beyond."""
    return (0.3 * torch.distributions.StudentT(2.0).sample(shape)).clamp(-1, 1).double()


NULLS = {
    "coin": lambda shape: skewed(shape, 0.5),
    "rare gains": lambda shape: skewed(shape, 0.05),
    "rare losses": lambda shape: -skewed(shape, 0.05),
    "heavy": heavy,
}


def test_it_is_maurer_and_pontils_bound() -> None:
    values = 0.7 * torch.rand(40).double() - 0.3
    bound, delta, m = 0.5, 0.03, 40
    unit = ((values + bound) / (2 * bound)).tolist()  # their theorem is for [0, 1]
    variance = sum((a - b) ** 2 for a, b in combinations(unit, 2)) / (m * (m - 1))
    log = math.log(2 / delta)
    expected = sum(unit) / m - math.sqrt(2 * variance * log / m) - 7 * log / (3 * (m - 1))
    found = certificate(values, torch.zeros(40), bound=bound, delta=delta)
    assert found.lower == pytest.approx(2 * bound * expected - bound, abs=1e-12)
    assert found.upper == pytest.approx(-lower_bound(-values, bound, delta), abs=1e-12)


@pytest.mark.parametrize("name", NULLS)
def test_without_a_gain_it_rarely_holds(name: str) -> None:
    draws = NULLS[name]((2000, 60))
    wrong = sum(lower_bound(draw, 1.0, 0.05) > 0 for draw in draws)
    assert wrong <= 0.02 * 2000  # its constants leave a wide margin


@pytest.mark.parametrize("name", NULLS)
def test_betting_is_wrong_as_rarely_as_it_says(name: str) -> None:
    draws = NULLS[name]((300, 80))
    wrong = sum(lower_bound(draw, 1.0, 0.1, "betting") > 0 for draw in draws)
    assert wrong <= stats.binom.ppf(0.999, 300, 0.1)


def grows_rich(values: Tensor, mean: float, delta: float) -> bool:
    """Waudby-Smith and Ramdas, section 4.1, one by one: bets that values in [0, 1] are above a mean."""
    capital, richest = 1.0, 1.0
    total, squares, m = 0.5, 0.25, len(values)
    for t, x in enumerate(values.tolist()):
        variance = squares / (t + 1)  # of the t examples before, and one made up
        stake = min(math.sqrt(2 * math.log(1 / delta) / (m * variance)), 0.75 / mean)
        capital *= 1 + stake * (x - mean)
        richest = max(richest, capital)
        total += x
        squares += (x - total / (t + 2)) ** 2
    return richest >= 1 / delta


def test_betting_is_a_game_that_sees_no_example_before_its_bet() -> None:
    for effect in (-0.2, 0.1, 0.6):
        values = (effect + 0.5 * torch.randn(60).double()).clamp(-1, 1)
        unit = (values[torch.randperm(60, generator=torch.Generator().manual_seed(0))] + 1) / 2
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if grows_rich(unit, middle, 0.05) else (low, middle)
        assert lower_bound(values, 1.0, 0.05, "betting") == pytest.approx(2 * low - 1, abs=1e-8)


def test_candidates_share_the_level() -> None:
    tries = [
        any(lower_bound(skewed((60,), 0.5), 1.0, 0.3 / 6, "betting") > 0 for _ in range(6))
        for _ in range(100)
    ]
    assert sum(tries) <= stats.binom.ppf(0.999, 100, 0.3)
    losses = skewed((60,), 0.4) + 0.6
    for method in ("bernstein", "betting"):
        one = certificate(losses, torch.zeros(60), bound=1.0, delta=0.05, method=method)
        six = certificate(losses, torch.zeros(60), bound=1.0, delta=0.3, candidates=6, method=method)
        assert (one.lower, one.upper) == (six.lower, six.upper)


def test_betting_does_not_trust_an_order_that_knows_of_the_losses() -> None:
    values = torch.cat([torch.ones(50), -torch.ones(50)]).double()
    assert lower_bound(values, 1.0, 0.05, "betting") < 0


def gain(examples: int, effect: float) -> tuple[Tensor, Tensor]:
    """Losses before and after, the difference normal with a deviation of 1."""
    before = 3 + torch.randn(examples).double()
    return before, before - effect - torch.randn(examples)


@pytest.mark.parametrize(("method", "examples"), [("bernstein", 400), ("betting", 120)])
def test_a_clear_gain_is_certified(method: Method, examples: int) -> None:
    held = [certificate(*gain(examples, 0.5), bound=3.0, method=method).holds for _ in range(40)]
    assert sum(held) >= 38
    harmed = [certificate(*gain(examples, -0.5), bound=3.0, method=method).harms for _ in range(40)]
    assert sum(harmed) >= 38


def test_betting_needs_a_third_of_the_examples() -> None:
    found = {
        method: certificate(*gain(5000, 0.3), bound=3.0, method=method).needed
        for method in ("bernstein", "betting")
    }
    assert found["bernstein"] is not None
    assert found["betting"] is not None
    assert 2.5 < found["bernstein"] / found["betting"] < 8


def test_needed_is_where_the_bound_passes_zero() -> None:
    found = certificate(*gain(100, 0.2), bound=2.0)
    assert found.needed is not None
    log = math.log(2 / 0.05)

    def lower(m: int) -> float:
        return found.mean - math.sqrt(2 * found.variance * log / m) - 14 * 2.0 * log / (3 * (m - 1))

    assert lower(found.needed) > 0 >= lower(found.needed - 1)
    assert certificate(*gain(100, -0.5), bound=2.0).needed is None


def test_betting_foretells_about_how_many_it_needs() -> None:
    needed = certificate(*gain(20_000, 0.3), bound=3.0, method="betting").needed
    assert needed is not None
    held = [certificate(*gain(needed, 0.3), bound=3.0, method="betting").holds for _ in range(40)]
    assert 8 <= sum(held) <= 36  # about half of the time, as it is a mean that is foretold


def test_what_clipping_hides_is_shown() -> None:
    before, after = torch.full((1000,), 2.0), torch.full((1000,), 1.9)
    after[:20] = 12.0  # 2 % are harmed by 10, the others gain 0.1
    found = certificate(before, after, bound=0.2)
    assert found.holds
    assert found.unclipped_mean == pytest.approx(0.98 * 0.1 - 0.02 * 10)
    assert found.clipped == pytest.approx(0.02)
    assert "2 % of the differences are beyond; the unclipped mean is -0.102" in str(found)
    assert not certificate(before, after, bound=10.0).holds


def test_the_bound_is_a_size_that_one_difference_in_a_hundred_exceeds() -> None:
    before = torch.randn(20_000)
    assert clip_from(before, torch.zeros(20_000)) == pytest.approx(stats.norm.ppf(0.995), rel=0.03)
    rare = torch.zeros(1000)
    rare[3] = -2.0
    assert clip_from(rare, torch.zeros(1000)) == 2.0  # most examples do not change at all
    with pytest.raises(UseError, match="same loss on each of 5 examples"):
        clip_from(torch.ones(5), torch.ones(5))


def test_it_is_read_back(tmp_path: Path) -> None:
    found = certificate(*gain(500, 0.5), bound=3.0)
    assert Certificate.load(found.save(tmp_path / "certificate.json")) == found


def test_it_says_what_is_certified() -> None:
    found = certificate(*gain(500, 0.5), bound=3.0, candidates=4)
    text = " ".join(str(found).split())
    assert found.title == found.verdict
    for words in (
        "certified: the mean clipped loss of an example falls by at least",
        "mean of the clipped difference",
        "for all 4 candidates together",
        "It is not about the unclipped mean",
        "this one pair of models",
    ):
        assert words in text
    before, after = gain(60, 0.1)
    unsure = certificate(before, after, bound=3.0)
    assert f"{unsure.needed:,} examples are needed, and there are 60" in unsure.verdict
    assert "do not help" in certificate(after, before + 1, bound=30.0).verdict
    assert "certified to harm" in str(certificate(*gain(500, -0.7), bound=3.0))


@pytest.mark.parametrize("method", ["bernstein", "betting"])
@pytest.mark.parametrize("candidates", [1, 7])
def test_with_the_least_examples_the_largest_gain_is_just_certified(method: Method, candidates: int) -> None:
    least = least_examples(0.05, candidates, method)

    def best(examples: int) -> bool:
        losses = torch.ones(examples), torch.zeros(examples)
        return certificate(*losses, bound=1.0, candidates=candidates, method=method).holds

    assert best(least)
    with pytest.raises(UseError, match=f"{least - 1} examples to certify on are too few.* at least {least}"):
        best(least - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"before": torch.ones(49)}, "49 losses before and 50 after"),
        ({"before": torch.ones(1), "after": torch.ones(1)}, "1 example"),
        ({"before": torch.ones(50, 2)}, r"before is a tensor of shape \(50, 2\)"),
        ({"after": [1.0] * 50}, "after is a list"),
        ({"bound": 0.0}, "bound is 0.0"),
        ({"bound": math.nan}, "bound is nan"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"candidates": 0}, "candidates is 0"),
        ({"method": "hope"}, "method is 'hope'. It is one of bernstein, betting"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    given = {"before": torch.ones(50), "after": torch.zeros(50), "bound": 1.0, **change}
    with pytest.raises(UseError, match=message):
        certificate(**given)


def test_a_loss_that_is_not_finite_is_named() -> None:
    after = torch.ones(50)
    after[[17, 30]] = math.nan
    with pytest.raises(UseError, match=r"loss of example 17 after the change is nan \(2 of 50"):
        certificate(torch.ones(50), after, bound=1.0)
    with pytest.raises(UseError, match="example 17 before the change"):
        clip_from(after, torch.ones(50))


def test_the_level_is_of_each_verdict() -> None:
    found = certificate(torch.zeros(500), torch.full((500,), 0.5), bound=1.0)
    assert found.harms
    assert "5 %, for each of the two verdicts, gain and harm" in str(found)
