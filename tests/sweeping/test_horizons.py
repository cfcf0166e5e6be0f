"""Exponents of batch and tokens, and what rules would lose, from runs whose best learning rate is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from theodolite import Size, UseError
from theodolite.optimizers.horizon import Horizon
from theodolite.sweeping import Sweep
from theodolite.sweeping.curves import labels
from theodolite.sweeping.families import analyse
from theodolite.sweeping.transfer import lines_of

from .synthetic import rows_of

BASE = Size(64, 4, batch=16, tokens=2**20)
GRID = [BASE.at(batch=2**b, tokens=2**d) for b, d in itertools.product((4, 5, 6), (20, 22))]
START = -8.0
CURVATURE = 0.2


def law(tokens, batch, *, planned=(0.0, 0.0), noise=0.0):
    """The loss where the best rate is `2^START·m_B^batch·m_D^−tokens`, and the runs take `planned` of that.

    The swept rate is that of the base, to which the plan adds its own exponents (tokens, batch).
    """

    def loss(size, e, seed):
        m_batch, m_tokens = (
            math.log2(getattr(size, name) / getattr(BASE, name)) for name in ("batch", "tokens")
        )
        rate = e - planned[0] * m_tokens + planned[1] * m_batch
        # A seed moves the optimum of each size by so much; the mean over seeds stays where it is.
        chance = random.Random(f"{size.batch} {size.tokens}")
        moves = [chance.gauss(0, 1) for _ in range(3)]
        own = noise * (moves[seed] - sum(moves) / 3)
        best = START + batch * m_batch - tokens * m_tokens + own
        return 3 - 0.1 * m_tokens + 0.02 * m_batch + CURVATURE * (rate - best) ** 2

    return loss


def rows(loss, sizes=GRID, **given):
    """Rows of a ledger, with the batch and tokens of each size."""
    found = []
    for size in sizes:
        beside = {"batch": size.batch, "planned_tokens": size.tokens}
        found += rows_of(loss, sizes=[size], **beside, **given)
    return found


def family_of(loss, sizes=GRID, base=BASE, **given):
    (family,) = analyse(rows(loss, sizes, **given), base=base)
    return family


def powers(family):
    return {one.along: one.value for one in family.horizon.exponents}


def test_exponents_of_a_known_law_are_found():
    family = family_of(law(tokens=0.3, batch=0.5))
    assert powers(family) == pytest.approx({"batch": 0.5, "tokens": -0.3}, abs=1e-6)
    assert family.horizon.horizon == Horizon("power", 0.3, 0.5)
    assert family.drift("batch").slope == pytest.approx(0.5, abs=1e-6)
    assert "the best rate goes as batch^0.50" in str(family)
    assert "the best rate goes as tokens^−0.30" in str(family)


@pytest.mark.parametrize("rule, planned", [("none", (0.0, 0.0)), ("sde", (0.5, 0.5))])
def test_intervals_cover_the_exponent_of_noisy_optima(rule, planned):
    loss = law(tokens=0.3, batch=0.5, noise=0.1, planned=planned)
    family = family_of(loss, horizon=rule, exponents=range(-12, -3))
    for one in family.horizon.exponents:
        truth = {"batch": 0.5, "tokens": -0.3}[one.along]
        assert one.interval.low < truth < one.interval.high
        # Slopes over two octaves of optima that move by about a tenth of one, with t of three seeds.
        assert 0.02 < one.interval.high - one.interval.low < 1.0
        assert one.value == pytest.approx((one.interval.low + one.interval.high) / 2)
        assert f"± {one.interval.high - one.value:.2g}" in str(one)
    alone = family_of(law(tokens=0.3, batch=0.5, noise=0.1), seeds=[0])
    assert not any(one.interval.known for one in alone.horizon.exponents)
    assert "by one seed" in str(alone)


@pytest.mark.parametrize(
    "rule, optimizer, planned",
    [
        ("sde", "adamw", (0.5, 0.5)),
        ("sde+timescale", "adamw", (0.5, 0.5)),
        ("sde", "sgd", (0.5, 1.0)),
        ("sde", "shampoo", (0.0, 0.0)),
        ("power(0.25, 1)", "sgd", (0.25, 1.0)),
        ("timescale", "adamw", (0.0, 0.0)),
    ],
)
def test_exponents_are_those_of_the_rate_itself_whatever_rule_planned_the_runs(rule, optimizer, planned):
    loss = law(tokens=0.3, batch=0.7, planned=planned)
    family = family_of(loss, horizon=rule, optimizer=optimizer, exponents=range(-12, -3))
    assert powers(family) == pytest.approx({"batch": 0.7, "tokens": -0.3}, abs=1e-6)
    # What is left to move is what the rule did not foresee.
    assert family.drift("batch").slope == pytest.approx(0.7 - planned[1], abs=1e-6)
    assert family.drift("tokens").slope == pytest.approx(planned[0] - 0.3, abs=1e-6)
    found = family.horizon.horizon
    assert (found.rates, found.timescale) == ("power", rule.endswith("timescale"))
    assert (found.tokens, found.batch) == (0.3, 0.7)


EXPONENTS = {
    "none": (0, 0),
    "sde": (0.5, 0.5),
    "power(0, 0.5)": (0, 0.5),
    "power(0.28, 0.5)": (0.28, 0.5),
    "power(0.32, 0.5)": (0.32, 0.5),
}


@pytest.mark.parametrize("truth", [(0.5, 0.5), (0.28, 0.5), (0.0, 0.0), (0.1, 0.2)])
@pytest.mark.parametrize("planned", ["none", "sde"])
def test_a_rule_loses_the_square_of_how_far_its_rate_is_off(truth, planned):
    loss = law(*truth, planned=EXPONENTS[planned])
    family = family_of(loss, horizon=planned, exponents=range(-13, -3))
    losses = {one.rule: one for one in family.horizon.losses}
    others = [size for size in GRID if size != BASE]
    for rule, (tokens, batch) in EXPONENTS.items():
        off = {
            size: (batch - truth[1]) * math.log2(size.batch / 16)
            - (tokens - truth[0]) * math.log2(size.tokens / 2**20)
            for size in others
        }
        lost = [CURVATURE * each**2 for each in off.values()]
        assert losses[rule].mean == pytest.approx(sum(lost) / len(lost), abs=1e-6)
        assert losses[rule].most == pytest.approx(max(lost), abs=1e-6)
        assert CURVATURE * off[losses[rule].at] ** 2 == pytest.approx(max(lost), abs=1e-6)
        assert losses[rule].outside == 0
    means = [one.mean for one in family.horizon.losses]
    assert means == sorted(means)
    measured = str(Horizon("power", *map(float, truth)))
    assert losses[measured].mean < 1e-6
    assert len(losses) == len(family.horizon.losses)  # none twice
    assert losses[family.horizon.losses[0].rule].mean < 1e-6
    assert f"of the rules compared, {family.horizon.losses[0].rule} loses least" in str(family)


def test_the_table_says_what_a_rule_does_to_the_rate_of_the_optimizer():
    for optimizer, words in (
        ("adamw", "√(m_B/m_D)"),
        ("sgd", "m_B/√m_D"),
        ("shampoo", "the same rate for all"),
    ):
        family = family_of(law(0.1, 0.2), optimizer=optimizer)
        assert {one.rule: one.words for one in family.horizon.losses}["sde"] == words
    by_rule = {one.rule: one.words for one in family.horizon.losses}
    assert by_rule["power(0.1, 0.2)"] == "measured here"
    assert by_rule["power(0.32, 0.5)"] == "√batch, tokens^−0.32"


def test_a_rate_beyond_those_tried_is_counted_and_stands_at_the_nearest():
    """The best rate does not move, and its rates are tried up to twice of it: √8 of it lies beyond."""
    sizes = [BASE, BASE.at(batch=32), BASE.at(batch=128)]
    family = family_of(law(0, 0), sizes, exponents=range(-10, -6))
    losses = {one.rule: one for one in family.horizon.losses}
    assert losses["power(0, 0.5)"].outside == 1
    assert losses["power(0, 0.5)"].most == pytest.approx(CURVATURE * 1**2)
    assert losses["none"].outside == 0


def test_a_rule_that_diverges_somewhere_comes_last():
    def loss(size, e, seed):
        return math.inf if size.batch > 16 and e > START else law(0, 0)(size, e, seed)

    family = family_of(loss, [BASE, BASE.at(batch=64)], exponents=range(-12, -4))
    losses = {one.rule: one for one in family.horizon.losses}
    assert math.isinf(losses["sde"].mean)
    assert math.isinf(family.horizon.losses[-1].mean)
    assert losses["none"].mean < 0.5
    assert "diverged" in str(family)


def test_sizes_of_other_networks_say_nothing_about_the_base():
    """Batches were varied at another width alone: there is an exponent, and no loss from the base's best."""
    wide = Size(128, 4, batch=16, tokens=2**20)
    family = family_of(law(0.0, 0.5), [BASE, wide, wide.at(batch=64)])
    assert powers(family) == pytest.approx({"batch": 0.5}, abs=1e-6)
    assert family.horizon.losses == ()


def test_without_batches_and_tokens_there_is_no_fit():
    def flat(size, e, seed):
        return 3 + (e - START) ** 2

    sizes = [Size(64, 4), Size(128, 4)]
    (family,) = analyse(rows_of(flat, sizes=sizes), base=sizes[0])
    assert family.horizon is None
    (family,) = analyse(rows(flat, [BASE]), base=BASE)
    assert family.horizon is None


def test_another_quantity_than_the_rate_has_no_such_exponents():
    found = [
        {**row, "lr": 0.1, "weight_decay": row["lr"]} for row in rows(law(0.3, 0.5), exponents=range(-12, -3))
    ]
    (family,) = analyse(found, base=BASE, over="weight_decay")
    assert family.horizon is None
    assert family.drift("batch").slope == pytest.approx(0.5, abs=1e-6)


def spec(**given):
    base = [BASE.width, BASE.depth, BASE.batch, BASE.tokens]
    return {
        "study": "sweep",
        "workload": "mine",
        "base": base,
        "axes": ["lr", "size"],
        "search": None,
        **given,
    }


def test_a_sweep_gives_the_measured_rule_of_its_plans():
    standard = rows(law(0.3, 0.5), parameterization="standard", horizon="none")
    planned = rows(law(0.2, 0.6, planned=(0.5, 0.5)), horizon="sde+timescale", exponents=range(-12, -3))
    own = rows(law(0.1, 0.1), parameterization="own", optimizer="own", horizon="none")
    found = Sweep.of([*own, *standard, *planned], spec())
    assert [family.parameterization for family in found.families] == ["own", "plan", "standard"]
    assert found.horizon == Horizon("power", 0.2, 0.6, timescale=True)
    assert Sweep.of(standard, spec()).horizon == Horizon("power", 0.3, 0.5)
    assert found.base == BASE


def test_a_rule_that_is_an_axis_is_each_familys_own():
    found = [
        *rows(law(0.3, 0.7, planned=(0.5, 0.5)), horizon="sde", exponents=range(-12, -3)),
        *rows(law(0.3, 0.7), horizon="none", exponents=range(-12, -3)),
    ]
    families = analyse(found, base=BASE, axes=["horizon"])
    assert [family.others["horizon"] for family in families] == ["sde", "none"]
    for family in families:
        assert powers(family) == pytest.approx({"batch": 0.7, "tokens": -0.3}, abs=1e-6)


def test_an_optimum_that_is_only_a_bound_has_no_exponent():
    """The best rates of larger batches lie beyond those that were tried."""
    found = Sweep.of(rows(law(0.0, 2.0), exponents=range(-10, -6)), spec())
    (family,) = found.families
    assert math.isnan(powers(family)["batch"])
    assert "measured here" not in str(family)
    with pytest.raises(
        UseError, match="how the best learning rate follows batch is not known, as the optimum"
    ):
        _ = found.horizon


def test_a_sweep_that_varied_neither_says_so():
    found = Sweep.of(rows(law(0, 0), [BASE]), spec())
    with pytest.raises(UseError, match=r"batch and tokens were not varied: .* by batches=\[…\] or tokens"):
        _ = found.horizon


def test_a_sweep_over_batches_comes_back_from_its_file_and_draws_its_lines(tmp_path):
    found = Sweep.of(rows(law(0.3, 0.5)), spec())
    again = Sweep.load(found.save(tmp_path / "sweep.json"))
    assert str(again) == str(found)
    assert again.horizon == found.horizon
    captions = [figure.caption for figure in found.figures()]
    assert len(captions) == 2  # along the batch and along the tokens
    assert any("batch 16, batch 32, batch 64" in caption for caption in captions)
    assert any("1.05M tokens, 4.19M tokens" in caption for caption in captions)


def test_growth_is_judged_along_networks_alone():
    """A larger batch may be worse at the same tokens."""
    family = family_of(law(0.3, 0.5))
    assert family.changes == ()
    assert family.uncompared == ()
    assert "growth" not in str(family)
    wider = [Size(width, 4, 16, 2**20) for width in (64, 128)]
    family = family_of(
        lambda size, e, seed: 3 - size.width / 640 + (e - START) ** 2, [*wider, BASE.at(batch=32)]
    )
    assert [(change.smaller, change.larger) for change in family.changes] == [tuple(wider)]
    assert family.uncompared == ()


def test_lines_differ_in_one_thing_alone():
    lines = lines_of(GRID, "batch")
    assert [[size.batch for size in line] for line in lines] == [[16, 32, 64]] * 2
    assert [{size.tokens for size in line} for line in lines] == [{2**20}, {2**22}]
    assert [[size.tokens for size in line] for line in lines_of(GRID, "tokens")] == [[2**20, 2**22]] * 3
    assert lines_of(GRID, "width") == []
    assert lines_of([Size(64, 4), Size(128, 4)], "batch") == []
    assert lines_of([Size(64, 4), Size(64, 4, batch=16)], "batch") == []


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (GRID, ["batch 16, 1.05M tokens", "batch 16, 4.19M tokens"]),
        ([BASE, BASE.at(tokens=2**22)], ["1.05M tokens", "4.19M tokens"]),
        ([BASE, BASE.at(batch=32)], ["batch 16", "batch 32"]),
        ([Size(64, 4, 16), Size(128, 4, 16)], ["64 × 4", "128 × 4"]),
        ([Size(64, 4, 16), Size(128, 4, 32)], ["64 × 4, batch 16", "128 × 4, batch 32"]),
        ([BASE], ["64 × 4, batch 16, 1.05M tokens"]),
        ([Size(64, 4), Size(128, 4)], ["64 × 4", "128 × 4"]),
    ],
)
def test_sizes_are_called_by_what_tells_them_apart(sizes, expected):
    found = labels(sizes)
    assert len(set(found.values())) == len(sizes)
    assert [found[size] for size in sizes][: len(expected)] == expected
