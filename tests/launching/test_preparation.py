"""What is run within a budget, from the parameters of a network that are a line of arithmetic."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import theodolite as th
from theodolite.launching import Preparation, prepare
from theodolite.launching.preparation import DESIGNS

from .worlds import BASE, BATCH, TARGET, TINY, Net, flop_per_token

RATES = [2.0**power for power in range(-9, -3)]


def prepared(to: th.Size = TARGET, budget: float = 0.2, **given: object) -> Preparation:
    return prepare(TINY, to, **{"budget": budget, "base": BASE, "rates": RATES, **given})


def steps_of(size: th.Size) -> int:
    return size.tokens // size.batch


def cost(made: Preparation, *, shares: bool = True) -> dict[str, int]:
    """FLOP of each stage; with wsd a run that has a longer one beside it makes its last fifth alone."""
    found = {}
    for stage in made.stages:
        most = max(size.tokens for size in stage.sizes)
        total = 0
        for size in stage.sizes:
            alone = steps_of(size)
            if stage.name == "rate" and shares and size.batch == made.base.batch and size.tokens < most:
                alone = round(alone / 5)
            total += alone * size.batch * flop_per_token(size.width, size.depth)
        found[stage.name] = total * stage.num_rates * stage.seeds
    return found


@pytest.mark.parametrize("budget", [0.2, 0.35, 0.6, 1.0])
@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_the_runs_and_two_more_learning_rates_fit_into_the_budget(budget, schedule):
    made = prepared(budget=budget, to=TARGET.at(tokens=12_000 * BATCH), schedule=schedule)
    spent = cost(made, shares=schedule == "wsd")
    assert {stage.name: stage.flop for stage in made.stages} == pytest.approx(spent)
    whole = made.target.tokens * flop_per_token(32, 4)
    assert made.target_flop == whole
    assert sum(spent.values()) + spent["rate"] * 2 / len(RATES) <= budget * whole


def test_the_richest_design_that_fits_is_taken():
    def least(design):
        """FLOP of the shortest runs of a design, with two more learning rates."""
        runs = 48 * BATCH
        at = {network: flop_per_token(*network) for network in ((8, 1), (16, 1), (8, 2), (16, 2))}
        *short, longest = design.lengths
        rate = runs * at[8, 1] * design.seeds * (len(RATES) + 2)
        rate *= longest + sum(round(48 * one / 5) / 48 for one in short)
        transfer = runs * 3 * design.seeds * (at[8, 1] + at[16, 1] + at[8, 2])
        law = runs * sum(design.law_lengths) * design.law_seeds * (at[8, 1] + at[16, 1] + at[16, 2])
        return (rate + transfer + law) / (TARGET.tokens * flop_per_token(32, 4))

    needed = [least(design) for design in DESIGNS]
    assert needed == sorted(needed, reverse=True)
    for design, part in zip(DESIGNS, needed, strict=True):
        made = prepared(budget=part * 1.001)
        lengths = tuple(size.tokens // made.base.tokens for size in made.stage("rate").sizes)
        assert (lengths, made.stage("rate").seeds, made.stage("law").seeds) == (
            design.lengths,
            design.seeds,
            design.law_seeds,
        )
        assert steps_of(made.base) == 48


def test_too_small_a_budget_names_the_least_that_works_and_it_does():
    with pytest.raises(th.UseError, match=r"budget is 0\.100% of the target's 8.15e") as refused:
        prepared(budget=0.001)
    named = float(re.search(r"give budget=([\d.]+)", str(refused.value))[1])
    assert prepared(budget=named).flop <= named * prepared(budget=named).target_flop
    with pytest.raises(th.UseError, match="the least that tells anything"):
        prepared(budget=0.98 * named)


def test_a_budget_above_the_whole_target_is_not_recommended():
    with pytest.raises(th.UseError, match=r"anything takes \d{3}\.\d+%: give a target with more tokens"):
        prepared(to=TARGET.at(tokens=200 * BATCH), budget=0.5)


def test_a_target_shorter_than_the_small_runs_is_refused():
    with pytest.raises(th.UseError, match=r"the target has 1528 tokens.*give it tokens=1536 or more"):
        prepared(to=TARGET.at(tokens=191 * BATCH), budget=1.0)
    with pytest.raises(th.UseError, match="the least that tells anything"):
        prepared(to=TARGET.at(tokens=192 * BATCH), budget=1.0)


def test_something_is_left_to_forecast():
    made = prepared(budget=1.0)
    assert max(size.tokens for stage in made.stages for size in stage.sizes) <= TARGET.tokens / 4


@pytest.mark.parametrize(
    ("width", "depth", "unbuildable", "base"),
    [
        (256, 16, (), th.Size(32, 4)),  # 1/8 and 1/4
        (256, 4, (), th.Size(32, 2)),  # no less than two blocks
        (256, 1, (), th.Size(32, 1)),
        (128, 4, (), th.Size(32, 2)),  # no narrower than 32
        (256, 4, (32,), th.Size(64, 2)),
        (256, 4, (32, 64), th.Size(128, 2)),
    ],
)
def test_the_base_is_the_smallest_that_can_be_built(width, depth, unbuildable, base):
    def build(width: int, depth: int) -> torch.nn.Module:
        if width in unbuildable:
            raise ValueError("no such width")
        return Net(width, depth)

    picky = dataclasses.replace(TINY, build=build)
    made = prepare(picky, th.Size(width, depth), budget=1.0, rates=RATES)
    assert made.base.network == base


def test_without_a_base_that_can_be_built_one_is_asked_for():
    with pytest.raises(th.UseError, match=r"the target is 32 × 4, and no network .* give base=Size"):
        prepared(base=None)


@pytest.mark.parametrize("base", [th.Size(32, 4), th.Size(64, 2), th.Size(16, 8)])
def test_a_base_that_is_not_smaller_than_the_target_is_refused(base):
    with pytest.raises(th.UseError, match=f"the base is {base} and the target 32 × 4: the base has to be"):
        prepared(base=base)


@pytest.mark.parametrize(
    ("to", "base", "transfer", "law"),
    [
        ((32, 4), (8, 1), {(8, 1), (16, 1), (8, 2)}, {(8, 1), (16, 1), (16, 2)}),
        ((32, 1), (8, 1), {(8, 1), (16, 1)}, {(8, 1), (16, 1), (32, 1)}),
        ((8, 4), (8, 1), {(8, 1), (8, 2)}, {(8, 1), (8, 2), (8, 4)}),
        ((12, 1), (8, 1), {(8, 1), (12, 1)}, {(8, 1), (12, 1)}),
    ],
)
def test_larger_networks_are_up_to_the_target_and_the_law_has_three_if_there_are_so_many(
    to, base, transfer, law
):
    made = prepared(to=th.Size(*to, tokens=60_000 * BATCH), base=th.Size(*base), budget=1.0)
    networks = [{(size.width, size.depth) for size in made.stage(name).sizes} for name in ("transfer", "law")]
    assert networks == [transfer, law]


def test_batches_are_tried_up_to_the_targets():
    def tried(batch):
        made = prepared(to=TARGET.at(batch=batch, tokens=60_000 * BATCH), budget=1.0)
        return sorted({size.batch for size in made.stage("rate").sizes})

    assert [tried(BATCH * factor) for factor in (1, 2, 4, 64)] == [[8], [8, 16], [8, 16, 32], [8, 16, 32]]
    assert tried(4) == [4]  # the base has no larger batch than the target


def test_batches_make_whole_steps():
    made = prepared(to=TARGET.at(batch=64, tokens=50_000 * BATCH), budget=0.77)
    for stage in made.stages:
        for size in stage.sizes:
            assert size.tokens % size.batch == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0.0}, "budget is 0"),
        ({"budget": 3.0}, "budget is 3"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"to": "width=32"}, "to is 'width=32': give a Size"),
        ({"base": 8}, "base is 8: give a Size"),
        ({"base": th.Size(8, 1, batch=4)}, r"base is 8 × 1, batch 4: .* give Size\(8, 1\)"),
        ({"rates": [0.1, 0.2]}, r"lr is \[0.1, 0.2\]: give 3 learning rates"),
        ({"rates": [0.1, 0.1, 0.1]}, "give 3 learning rates"),
        ({"rates": [0.1, 0.2, -0.4]}, "lr is -0.4"),
        ({"schedule": "wds"}, "schedule is 'wds'.*wsd"),
    ],
)
def test_what_cannot_be_used_is_named(given, said):
    with pytest.raises(th.UseError, match=said):
        prepared(**{"to": TARGET, **given})


def test_a_preparation_can_be_saved_and_read_and_leaves_random_numbers_alone(tmp_path):
    before = torch.random.get_rng_state()
    made = prepared()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert Preparation.load(made.save(tmp_path / "made.json")) == made
