import dataclasses
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.models import ResidualMLP
from theodolite.surveying import SurveyContext
from theodolite.surveying.budget import with_few
from theodolite.surveying.section import PLANNABLE
from theodolite.surveying.sections import transfer
from theodolite.surveying.sections.transfer import Move, search, section
from theodolite.surveying.trials import trials_of
from theodolite.workloads import Workload

examine = section.run

BASE, WIDE, DEEP = Size(64, 2), Size(256, 2), Size(64, 8)
PLANNED, STANDARD = "plan", "standard"
WORK = transfer.RUNS * transfer.QUICK.seeds * transfer.QUICK.steps


def learnable(name="learnable", **changes):
    """Rows of sixteen numbers; the class is the greatest of the first four."""

    def batch(seed, step):
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        inputs = torch.randn(64, 16, generator=generator)
        return inputs, inputs[:, :4].argmax(1)

    build = partial(ResidualMLP, inputs=16, outputs=4)
    given = {"build": build, "batch": batch, "loss": nn.functional.cross_entropy, "size": Size(64, 4)}
    return Workload(name, **given | changes)


def site_of(workload, **options):
    return SurveyContext(workload, workload.size, **options)


def only(site):
    (finding,) = examine(site)
    return finding


@pytest.fixture(scope="module")
def site():
    """Networks that are never trained: their losses are told by a formula."""
    torch.set_num_threads(1)  # before the fixture of every test does it
    return site_of(learnable())


@pytest.fixture
def hasty(monkeypatch):
    """Networks are trained for three steps."""
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, steps=3))


@pytest.fixture
def told(monkeypatch):
    """Losses by formula; which runs were asked for."""
    asked = []

    def install(formula, first=5.0):
        def train(self, how, size, exponent, seed):
            asked.append((how, size, exponent, seed))
            self.first.append(first)
            return formula(how, size, exponent, seed)

        monkeypatch.setattr(transfer._Runs, "_train", train)
        return asked

    return install


def bowl(exponent, best, bend=0.1):
    return 2.0 + bend * (exponent - best) ** 2


def test_a_trained_network_keeps_its_rate_under_a_plan_and_not_without():
    """The widest is four times the base: AdamW's step on a hidden weight is then four times too large."""
    finding = only(site_of(learnable(), seed=2))
    assert (finding.code, finding.level) == ("TH401", "note")
    assert "Under a plan, the best learning rate stays" in finding.sentence
    assert "Without a plan it moves from" in finding.sentence
    assert "Tune the learning rate at 64 × 2" in finding.remedy
    rows = {row["size"]: row for row in finding.evidence.rows}
    assert list(rows) == ["64 × 2", "64 × 8", "256 × 2"]
    exponents = {
        how: {size: float(row[f"best, {how}"].removeprefix("2^")) for size, row in rows.items()}
        for how in (PLANNED, STANDARD)
    }
    assert exponents[PLANNED]["64 × 2"] == exponents[STANDARD]["64 × 2"]
    assert exponents[PLANNED]["256 × 2"] == pytest.approx(exponents[PLANNED]["64 × 2"], abs=1)
    assert exponents[STANDARD]["256 × 2"] < exponents[PLANNED]["256 × 2"] - 1
    width, depth = finding.evidence.figures
    assert [panel.title for panel in width.panels] == ["adamw, plan", "adamw, standard"]
    assert "256 × 2" in width.caption
    assert "64 × 8" in depth.caption


def test_the_best_is_found_wherever_it_is_and_no_run_is_made_twice(site, told):
    asked = told(lambda how, size, exponent, seed: bowl(exponent, -4.75 if how == PLANNED else -11.25))
    found = search(trials_of(site))
    for size in (BASE, WIDE, DEEP):
        assert math.log2(found.plan.optimum(size).value) == pytest.approx(-4.75)
    for size in (WIDE, DEEP):
        assert math.log2(found.standard.optimum(size).value) == pytest.approx(-11.25)
    assert len(set(asked)) == len(asked)
    # At base size the plan changes nothing: one training serves both.
    assert not [run for run in asked if run[:2] == (STANDARD, BASE)]
    assert found.standard.optimum(BASE).value == found.plan.optimum(BASE).value
    # Where the best stays, its neighbours are all that is tried.
    assert sorted(run[2] for run in asked if run[:2] == (PLANNED, WIDE)) == [-7, -6, -5, -4]


def test_a_dent_above_the_optimum_does_not_stop_the_search(site, told):
    dented = {-6: 2.6, -7: 2.5, -8: 2.55}
    told(lambda how, size, e, seed: dented.get(e, bowl(e, -10)) if how == STANDARD else bowl(e, -7))
    assert math.log2(search(trials_of(site)).standard.optimum(WIDE).value) == pytest.approx(-10)


def test_a_rate_that_stays_everywhere_is_all_well(site, told):
    told(lambda how, size, exponent, seed: bowl(exponent, -7.5 if size == WIDE else -7))
    finding = only(site)
    assert (finding.level, finding.title) == ("ok", "A learning rate that transfers")
    assert finding.sentence == (
        "Under a plan, the best learning rate stays within 0.5 octaves of 2^-7, the best of 64 × 2, up to "
        "256 × 2 and 64 × 8. Using the rate of 64 × 2 costs them nothing. Without a plan it stays within 0.5 "
        "octaves of 2^-7, the best of 64 × 2, up to 256 × 2 and 64 × 8. Using the rate of 64 × 2 costs them "
        "nothing."
    )
    assert finding.remedy == ""


def test_what_moves_without_a_plan_is_noted_with_its_pace_and_price(site, told):
    told(lambda how, size, exponent, seed: bowl(exponent, -9 if (how, size) == (STANDARD, WIDE) else -7))
    finding = only(site)
    assert (finding.level, finding.title) == ("note", "A learning rate that transfers only under a plan")
    # Two octaves in two doublings; 0.1 · 2² lost of the 5 − 2 that are learnt.
    assert (
        "Without a plan it moves from 2^-7 at 64 × 2 to 2^-9 at 256 × 2, −1.00 octaves per doubling of the "
        "width. With the rate of 64 × 2, 256 × 2 loses 13.3 % of the progress." in finding.sentence
    )


@pytest.mark.parametrize(
    ("octaves", "share", "counts"),
    [
        (-3, 0.009, False),  # far, but it costs nothing
        (0.9, 0.04, False),
        (1.1, 0.04, True),
        (-0.6, 0.06, True),  # nearer, and dear
        (0.4, 0.3, False),  # no farther than two whole octaves can tell apart
        (0.1, math.inf, True),
    ],
)
def test_a_move_counts_if_it_is_far_and_dear(octaves, share, counts):
    assert Move(WIDE, octaves, share, sure=False).counts is counts


def test_of_several_moves_one_that_diverges_is_told(site, told):
    def formula(how, size, exponent, seed):
        if how == STANDARD and size == DEEP:
            return math.inf if exponent > -9 else bowl(exponent, -9)
        return bowl(exponent, -12 if how == STANDARD else -7)

    told(formula)
    assert "to 2^-9 at 64 × 8" in only(site).sentence


def test_what_moves_under_a_plan_in_every_seed_is_a_warning(site, told):
    asked = told(lambda how, size, exponent, seed: bowl(exponent, -5 if size == DEEP else -7) + seed / 100)
    finding = only(site)
    assert (finding.level, finding.title) == ("warn", "A learning rate that moves even under a plan")
    assert "Under a plan, the best learning rate moves from 2^-7 " in finding.sentence
    assert "1.00 octaves per doubling of the depth" in finding.sentence
    assert finding.evidence.numbers["seeds"] == 3
    assert {run[3] for run in asked if run[0] == PLANNED} == {0, 1, 2}
    assert {run[3] for run in asked if run[0] == STANDARD} == {0, 1, 2}


def test_plan_and_standard_are_compared_on_the_same_seeds(site, told):
    """At base size the two are one training, so the table cannot have two numbers for it."""

    def formula(how, size, exponent, seed):
        # The first seed alone has another optimum than the mean of three.
        at_base = -7.6 if seed == 0 else -7
        return bowl(exponent, at_base if size == BASE else -6) + seed / 10

    asked = told(formula)
    finding = only(site)
    assert finding.evidence.numbers["seeds"] == 3
    for size in (WIDE, DEEP):
        seeds = {how: {run[3] for run in asked if run[:2] == (how, size)} for how in (PLANNED, STANDARD)}
        assert seeds[PLANNED] == seeds[STANDARD] == {0, 1, 2}
    assert len(set(asked)) == len(asked)
    assert not [run for run in asked if run[:2] == (STANDARD, BASE)]
    (first, *_) = finding.evidence.rows
    assert first["size"] == "64 × 2"
    assert first["best, plan"] == first["best, standard"]
    # The mean of (e + 7.6)², (e + 7)² and (e + 7)² is least at −7.2.
    assert first["best, plan"].startswith("2^-7.2 ± ")
    assert first["loss, plan"] == first["loss, standard"]


def test_a_larger_size_to_tune_at_is_named(told):
    told(lambda how, size, exponent, seed: bowl(exponent, -7 if size == BASE else -4))
    finding = only(site_of(learnable(), deep=True))
    assert finding.level == "warn"
    assert "From 128 × 2 to 512 × 2 it stays: tune there." in finding.remedy


def test_seeds_that_disagree_make_no_warning(site, told):
    # Of three seeds one says four octaves up, the others stay: the mean moves, but who knows.
    def formula(how, size, exponent, seed):
        moved = how == PLANNED and size == DEEP and seed == 0
        return bowl(exponent, -3, bend=0.4) if moved else bowl(exponent, -7)

    told(formula)
    finding = only(site)
    assert (finding.level, finding.title) == ("note", "Learning-rate transfer")
    assert "seems to move" in finding.sentence
    assert "--deep" in finding.remedy


def test_a_noisy_seed_that_others_do_not_bear_out_is_forgotten(site, told):
    def formula(how, size, exponent, seed):
        return bowl(
            exponent, -5 if (size, seed) == (DEEP, 0) and how == PLANNED else -7, bend=0.02 + 0.1 * seed
        )

    told(formula)
    assert only(site).level == "ok"


def test_a_large_network_that_diverges_with_the_base_s_rate_is_a_warning(site, told):
    told(lambda how, size, e, seed: math.inf if size == WIDE and e > -8 else bowl(e, -7))
    finding = only(site)
    assert finding.level == "warn"
    assert "With the rate of 64 × 2, 256 × 2 diverges" in finding.sentence
    assert finding.evidence.rows[-1]["lost, plan"] == "diverges"


def test_a_large_network_that_ends_above_its_start_loses_more_than_all_of_the_progress(site, told):
    told(lambda how, size, e, seed: bowl(e, -9, bend=5.0) if (how, size) == (STANDARD, WIDE) else bowl(e, -7))
    assert "With the rate of 64 × 2, 256 × 2 loses more than all of the progress." in only(site).sentence


def test_a_large_network_that_always_diverges_is_a_warning(site, told):
    told(lambda how, size, exponent, seed: math.inf if size == WIDE else bowl(exponent, -7))
    finding = only(site)
    assert finding.level == "warn"
    assert "256 × 2 diverges at all rates that were tried" in finding.sentence
    assert finding.evidence.rows[-1]["best, plan"] == "all diverged"


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        (lambda *run: math.inf, "64 × 2 diverges at every learning rate down to 2^-14"),
        (lambda how, size, exponent, seed: bowl(exponent, 3), "is 2^-2 or beyond"),
        (
            lambda how, size, exponent, seed: bowl(exponent, -7) + 2.99,
            "the loss is 4.990 at best, and it started at",
        ),
    ],
)
def test_what_a_few_runs_cannot_tell_is_noted_and_no_larger_network_is_trained(site, told, formula, reason):
    asked = told(formula)
    finding = only(site)
    assert (finding.level, finding.title) == ("note", "Learning-rate transfer")
    assert finding.sentence.startswith("A few small runs cannot decide whether")
    assert reason in finding.sentence
    assert {size for _, size, _, _ in asked} == {BASE}


@pytest.mark.usefixtures("hasty")
def test_a_network_that_never_trains_is_survived():
    workload = learnable(loss=lambda logits, targets: logits.sum() * math.inf)
    finding = only(site_of(workload))
    assert finding.level == "note"
    assert "diverges at every learning rate" in finding.sentence


def test_too_large_networks_are_left_alone(site, told, monkeypatch):
    asked = told(lambda *run: 2.0)
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, work=1.0))
    assert "networks wider than 64 × 2 take too long" in only(site).sentence
    assert not asked


def test_of_sizes_that_take_too_long_the_next_smaller_one_is_tried(site, told, monkeypatch):
    told(lambda how, size, exponent, seed: bowl(exponent, -7))
    trials, workload = trials_of(site), trials_of(site).workload
    most = WORK * trials.step_work(Size(128, 2), workload)
    assert WORK * trials.step_work(WIDE, workload) > most
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, work=1.1 * most))
    assert [curve.size for curve in search(trials).plan.curves][-1] == Size(128, 2)


def test_deeper_networks_are_left_out_where_all_together_take_too_long(site, told, monkeypatch):
    asked = told(lambda how, size, exponent, seed: bowl(exponent, -7))
    trials, workload = trials_of(site), with_few(trials_of(site).workload, transfer.TARGETS)
    works = [WORK * trials.step_work(size, workload) for size in (BASE, WIDE, DEEP)]
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, planned=sum(works) - 1))
    assert {curve.size for curve in search(trials).plan.curves} == {BASE, WIDE}
    assert {run[1] for run in asked} == {BASE, WIDE}


def test_where_more_seeds_are_too_much_work_the_first_one_is_told(site, told, monkeypatch):
    told(lambda how, size, exponent, seed: bowl(exponent, -9 if size == WIDE else -7))
    formula = transfer._Runs._train

    def train(self, how, size, exponent, seed):
        if seed != site.seed:
            raise transfer.Undecided("45 small runs were not enough: it would take too much")
        return formula(self, how, size, exponent, seed)

    monkeypatch.setattr(transfer._Runs, "_train", train)
    finding = only(site)
    assert (
        "Under a plan, the best learning rate seems to move from 2^-7 at 64 × 2 to 2^-9" in finding.sentence
    )
    assert (
        "This is one seed, so it may be noise; with more, 45 small runs were not enough: it would take too "
        "much." in finding.sentence
    )
    assert finding.evidence.numbers["seeds"] == 1


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda exponent: math.inf, "64 × 2 diverges at every learning rate down to 2^-14"),
        (
            lambda exponent: 2.0 - 0.2 * (exponent + 2),
            "after 16 steps of 64 × 2 the best learning rate is 2^-2 or beyond, at the end of the range "
            "tried",
        ),
        (
            lambda exponent: 30.0,
            "after 16 steps of 64 × 2 the loss is 20.667 at best, and it started at 5.000",
        ),
    ],
    ids=["diverges", "at the end", "learns nothing"],
)
def test_where_more_seeds_cannot_decide_the_reason_is_told(site, told, other, reason):
    def formula(how, size, exponent, seed):
        if seed and size == BASE:
            return other(exponent)
        return bowl(exponent, -9 if size == WIDE else -7, bend=0.01)

    told(formula)
    finding = only(site)
    assert (finding.level, finding.evidence.numbers["seeds"]) == ("note", 1)
    assert "seems to move from 2^-7 at 64 × 2 to 2^-9" in finding.sentence
    assert f"This is one seed, so it may be noise; with more, {reason}." in finding.sentence
    assert "too long" not in finding.sentence


def test_work_is_counted(monkeypatch):
    workload = learnable()
    trials = trials_of(site_of(workload))
    step = trials.step_work(trials.base, with_few(trials.workload, transfer.TARGETS))
    most = 2.5 * transfer.QUICK.steps * step
    monkeypatch.setattr(transfer, "RUNS", 0)  # an estimate that is far too low
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, most=most))
    said = only(site_of(workload)).sentence
    assert f"2 small runs were not enough: it would take more than {most:.2g} multiplications" in said


def test_with_time_there_are_seeds_half_octaves_and_all_sizes(site, told):
    asked = told(lambda how, size, exponent, seed: bowl(exponent, -6.75))
    found = search(trials_of(site_of(learnable(), deep=True)))
    sizes = [curve.size for curve in found.plan.curves]
    assert sizes == sorted(
        [BASE, *(Size(64 * k, 2) for k in (2, 4, 8)), *(Size(64, 2 * k) for k in (2, 4, 8))]
    )
    assert {run[3] for run in asked} == {0, 1, 2}
    assert {run[2] for run in asked if run[:2] == (PLANNED, WIDE)} == {-9, -8, -7.5, -7, -6.5, -6}


def test_batches_have_about_a_hundred_targets():
    def batch(seed, step):
        return torch.zeros(16, 32, dtype=torch.long), torch.ones(16, 32, dtype=torch.long)

    text = learnable(batch=batch, held_out=batch)
    lighter = with_few(text, transfer.TARGETS)
    assert lighter.draw(0, 0)[1].shape == lighter.draw_held_out(0)[1].shape == (4, 32)
    # One example is left, however long, and what cannot be cut stays whole.
    long = dataclasses.replace(text, batch=lambda seed, step: tuple(torch.ones(3, 500) for _ in range(2)))
    assert with_few(long, transfer.TARGETS).draw(0, 0)[0].shape == (1, 500)
    odd = dataclasses.replace(text, batch=lambda seed, step: (torch.ones(999, 2), torch.tensor(1)))
    assert with_few(odd, transfer.TARGETS).draw(0, 0)[0].shape == (999, 2)


@pytest.mark.usefixtures("hasty")
def test_no_trace_is_left():
    def state():
        return torch.get_rng_state(), np.random.get_state()[1], random.getstate(), torch.get_num_threads()

    class Dropped(ResidualMLP):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.1, self.training)

    def build(width, depth):
        return Dropped(width, depth, inputs=16, outputs=4)

    torch.manual_seed(7)
    before = state()
    first = only(site_of(learnable(build=build, size=Size(16, 2))))
    after = state()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]
    torch.manual_seed(8)
    assert only(site_of(learnable(build=build, size=Size(16, 2)))) == first


@pytest.mark.usefixtures("hasty")
def test_roles_that_were_told_are_kept():
    class Odd(ResidualMLP):
        """With a parameter that no rule could place."""

        def __init__(self, width, depth):
            super().__init__(width, depth, inputs=16, outputs=4)
            self.idle = nn.Parameter(torch.zeros(3, 5))

        def forward(self, x):
            return torch.maximum(super().forward(x), self.idle.sum() - 99)

    finding = only(site_of(learnable(build=Odd), roles={"idle": "bias"}))
    assert finding.code == "TH401"
    assert finding.evidence.rows


def test_a_network_that_cannot_be_tried_is_the_plan_s_affair():
    huge = learnable(
        build=lambda width, depth: ResidualMLP(40 * width, depth, inputs=16, outputs=4), size=Size(512, 2)
    )
    finding = only(site_of(huge))
    assert (finding.code, finding.title) == ("TH204", PLANNABLE.title)


def test_what_fails_in_training_is_noted():
    def batch(seed, step):
        if step < 5:
            return learnable().batch(seed, step)
        return torch.zeros(0, 16), torch.zeros(0, dtype=torch.long)

    finding = only(site_of(learnable(batch=batch)))
    assert (finding.code, finding.level) == ("TH401", "note")
    assert "batch(0, 5) is empty" in finding.sentence
