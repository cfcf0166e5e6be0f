"""The growing study: training by tables is training, ways spend alike, and claims see what is there."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from theodolite.cli import main
from theodolite.fits.laws import depth_recursion
from theodolite.growing import certificate
from theodolite.models import GPT
from theodolite.workloads import next_token_loss
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import conduct
from theodolite_studies.growing import coverage
from theodolite_studies.growing import fits as growing_fits
from theodolite_studies.growing.claims import claims
from theodolite_studies.growing.figures import figures
from theodolite_studies.growing.fits import envelope
from theodolite_studies.growing.ranking import SIGNALS, correlation, ranked, realised, spearman
from theodolite_studies.growing.setting import FULL, SEEDS, SMALL
from theodolite_studies.growing.signals import looked_at, stream_squares
from theodolite_studies.growing.study import STUDY, cells
from theodolite_studies.growing.tables import notes
from theodolite_studies.growing.training import Course, Lesson, Pupil, enrolled, flops_of, optimizer_of, wsd
from theodolite_studies.growing.ways import grown_in_all_ways, stacked

TINY = dataclasses.replace(
    SMALL,
    length=16,
    num=4,
    held_out=8,
    units=4,
    certify=24,
    width=32,
    depth=2,
    before=4,
    after=12,
    warmup=2,
    decay=3,
    looks=2,
    draws=1,
    ranked_depth=1,
    ranked_before=3,
    moments=(1, 2),
    orders=1,
)
LESSON = Lesson.of(TINY, "cpu")


def pupil_of(depth=2, seed=0):
    return enrolled(TINY, TINY.width, depth, seed, "cpu")


# Training


def test_a_course_is_training_with_adamw_on_the_windows_of_its_order():
    pupil, factors = pupil_of(), wsd(5, warmup=2, decay=2)
    plain = GPT(TINY.width, 2, context=TINY.length)
    plain.load_state_dict(pupil.model.state_dict())
    course = Course(pupil, LESSON, order="a", first=3, factors=factors)
    course.go(2)
    course.go(3)
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for factor, start_B in zip(factors, LESSON.starts("a", 8)[3:], strict=True):
        windows = torch.stack([LESSON.train[start : start + TINY.length + 1] for start in start_B]).long()
        optimizer.param_groups[0]["lr"] = TINY.lr * factor
        optimizer.zero_grad()
        next_token_loss(plain(windows[:, :-1]), windows[:, 1:]).backward()
        optimizer.step()
    for (name, one), other in zip(plain.named_parameters(), pupil.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)


def test_a_copy_goes_its_own_way_with_the_same_moments():
    pupil = pupil_of()
    Course(pupil, LESSON, order=0, first=0, factors=[1.0] * 3).go(3)
    before, copied = pupil.model.readout.weight.clone(), pupil.copied()
    Course(copied, LESSON, order=0, first=3, factors=[1.0]).go(1)
    assert torch.equal(pupil.model.readout.weight, before)
    Course(pupil, LESSON, order=0, first=3, factors=[1.0]).go(1)
    assert torch.equal(pupil.model.readout.weight, copied.model.readout.weight)
    assert not torch.equal(pupil.model.readout.weight, before)


def test_what_the_optimizer_does_not_hold_is_not_trained():
    pupil = pupil_of()
    before = {name: one.clone() for name, one in pupil.model.named_parameters()}
    alone = Pupil(pupil.model, optimizer_of(pupil.model.blocks[1].parameters(), TINY, "cpu"))
    Course(alone, LESSON, order=0, first=0, factors=[1.0]).go(1)
    moved = {name for name, one in pupil.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if name.startswith("blocks.1.")}


def test_flops_are_those_that_torch_counts():
    """It counts all of attention, of which half is masked: 2·depth·width·T² for each sequence."""
    model, tokens = pupil_of(3).model, torch.zeros(TINY.num, TINY.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    masked = TINY.num * 2 * 3 * TINY.width * TINY.length**2
    if counter.get_flop_counts()["Global"].keys() == {torch.ops.aten.mm}:  # attention was not seen
        masked -= 2 * masked
    assert flops_of(TINY, TINY.width, 3) / 3 == counter.get_total_flops() - masked


# Ways


@pytest.fixture(scope="module")
def grown():
    return list(grown_in_all_ways(TINY, 0, 2, "cpu"))


def test_all_ways_spend_the_same(grown):
    step = flops_of(TINY, TINY.width, 4)
    ways = {one["way"]: one for one in grown[1:]}
    budget = 4 * flops_of(TINY, TINY.width, 2) + 12 * step
    for way, one in ways.items():
        depth = 2 if way == "none" else 4
        spent = one["curve"][-1][0]
        assert budget - flops_of(TINY, TINY.width, depth) < spent * (1 + 1e-4), way
        assert spent <= budget * (1 + 1e-4), way
    assert ways["even"]["steps"] == ways["random"]["steps"] == 12
    assert ways["scratch"]["steps"] == int(budget / step)
    # 8 sequences, 5/3 of a training step each, at half the depth.
    assert ways["signal"]["steps"] == int(12 - 8 / 4 * 5 / 3 * flops_of(TINY, TINY.width, 2) / step)
    assert ways["jump"]["steps"] < ways["tried"]["steps"] <= ways["signal"]["steps"]


def test_closed_blocks_start_where_the_network_was(grown):
    base, ways = grown[0], {one["way"]: one for one in grown[1:]}
    for way in ("none", "signal", "even", "random", "weakest", "tried"):
        assert ways[way]["first"] == pytest.approx(base["loss"], abs=2e-6), way
    assert abs(ways["stack"]["first"] - base["loss"]) > 1e-4
    assert abs(ways["jump"]["first"] - base["loss"]) > 1e-6


def test_places_are_those_of_the_signal(grown):
    base, ways = grown[0], {one["way"]: one for one in grown[1:]}
    order = np.argsort(base["gains"])
    assert ways["signal"]["places"] == sorted(order[-2:])
    assert ways["weakest"]["places"] == sorted(order[:2])
    assert ways["tried"]["places"] == ways["jump"]["places"] == sorted(np.argsort(base["jumps"])[-2:])
    assert ways["even"]["places"] == [1, 2]


def test_stacking_repeats_the_last_blocks():
    pupil = pupil_of(3)
    tokens = LESSON.batches("x", 2)[0][0]
    names = [name for name, _ in pupil.model.named_parameters()]
    old = GPT(TINY.width, 5, context=TINY.length)
    state = pupil.model.state_dict()
    state |= {
        name.replace(f"blocks.{k}.", f"blocks.{k + 2}."): state[name]
        for k in (1, 2)
        for name in names
        if name.startswith(f"blocks.{k}.")
    }
    old.load_state_dict(state)
    stacked(pupil, 2)
    torch.testing.assert_close(pupil.model(tokens), old(tokens))
    held = {id(one) for group in pupil.optimizer.param_groups for one in group["params"]}
    assert held == {id(one) for one in pupil.model.parameters()}


def test_the_relative_gain_does_not_see_the_scale_of_the_stream():
    """Doubled throughout, a pre-norm network computes the same: its gains are a quarter."""
    pupil, doubled = pupil_of(), pupil_of()
    with torch.no_grad():
        doubled.model.embed.weight.mul_(2)
        for block in doubled.model.blocks:
            block.attention.branch.out.weight.mul_(2)
            block.feed_forward.branch.down.weight.mul_(2)
    one, other = (looked_at(each, LESSON, 0) for each in (pupil, doubled))
    for first, second in zip(one.signal.points, other.signal.points, strict=True):
        assert second.gain == pytest.approx(first.gain / 4, rel=1e-2)
        assert other.relative(second) == pytest.approx(one.relative(first), rel=1e-2)
    embedded = pupil.model.embed(LESSON.batches("estimate 0", 4)[0][0])
    assert one.squares[0] == pytest.approx(embedded.square().mean().item(), rel=1e-5)
    assert len(stream_squares(pupil, LESSON.batches("x", 2)[0][0])) == 3


# Ranking


def test_correlation_is_spearmans():
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 12)).round(1)
    expected = stats.spearmanr(one, other).statistic
    assert spearman(one, other) == pytest.approx(expected)
    found = correlation({0: (one, other), 1: (one, one)})
    assert found.value == pytest.approx((expected + 1) / 2)
    low, high = found.over_points
    assert low < found.value < high
    assert math.isnan(spearman(one, np.zeros(12)))


def test_an_interval_over_seeds_is_students_and_two_seeds_have_none():
    up = np.arange(13.0)
    readings = [np.random.default_rng(seed).permutation(up) + up for seed in range(4)]
    pairs = {seed: (up, each) for seed, each in enumerate(readings)}
    values = [stats.spearmanr(up, each).statistic for each in readings]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert correlation(pairs).over_seeds == pytest.approx(np.clip(expected, -1, 1))
    # As smooth as they are, and whatever the points say.
    alike = correlation({0: (up, up), 1: (up, up)})
    assert np.isnan(alike.over_seeds).all()
    assert "no interval" in str(alike)


def test_an_interval_over_points_keeps_to_the_seeds_that_are_there():
    """With as many draws as one likes: no draw of seeds leaves one of them out."""
    up = np.arange(9.0)
    found = correlation({0: (up, up), 1: (up, -up), 2: (up, up)})
    assert found.over_points == pytest.approx((1 / 3, 1 / 3))


def test_a_control_that_trains_on_is_what_gains_are_measured_against():
    records = list(ranked(TINY, 0, "cpu"))
    assert {(one["variant"], one["point"]) for one in records} == {
        (v, p) for v in ("new", "all") for p in (0, 1)
    }
    new, everything = ([one for one in records if one["variant"] == v] for v in ("new", "all"))
    assert len({one["control"]["1"] for one in new} | {one["control"]["2"] for one in new}) == 1
    assert everything[0]["control"]["1"] != everything[0]["control"]["2"]
    # With one block of three trained for one step little changes, whatever the others do.
    assert all(abs(one["gained"]["1"]) < 0.5 for one in records)
    assert {
        seed: len(each)
        for seed, each in realised([{**one, "seed": 0} for one in records], "all", 2, "gained").items()
    } == {0: 2}


# Coverage


def test_the_direction_is_minus_the_gradient_by_the_inverse_moments():
    problem = coverage.Problem.drawn(1.0)
    sample = problem.sample("x", 200)
    change = torch.zeros(coverage.WIDTH, coverage.FEATURES, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(problem.losses(sample, 1, change).mean(), change)
    moments = sample.features[1].T @ sample.features[1] / 200
    moments += coverage.RIDGE * moments.diagonal().mean() * torch.eye(coverage.FEATURES)
    torch.testing.assert_close(problem.direction(sample, 1) @ moments, -gradient)


def test_without_anything_to_gain_every_block_harms_and_only_misuse_certifies_one(monkeypatch):
    monkeypatch.setattr(coverage, "POOL", 10_000)
    few = dataclasses.replace(TINY, repetitions=8)
    honest = list(coverage.covered(few, "nothing", coverage.WAYS[0]))
    misused = list(coverage.covered(few, "nothing", coverage.WAYS[2]))
    assert [one["issued"] for one in honest] == [0, 0]
    assert all(one["truth"] < 0 for one in honest)
    assert [one["wrong"] for one in misused] == [2, 2]


def test_the_tally_counts_what_it_says():
    found = certificate(torch.ones(400), torch.zeros(400) + 0.5 * torch.rand(400), bound=1.0)
    tally = coverage.Tally()
    for truth, unclipped in (((found.lower + found.mean) / 2, 1.0), (found.lower / 2, -1.0), (-0.1, -1.0)):
        tally.add(found, truth, unclipped)
    counts = {"issued": 3, "wrong": 1, "harmful": 2, "above": 2}
    assert {name: tally.record()[name] for name in counts} == counts


# The envelope


def with_few_starts(steps, loss):
    law = depth_recursion(steps, loss)
    return dataclasses.replace(law, starts=law.starts[::7])


@pytest.fixture(autouse=True)
def few_draws_and_starts(monkeypatch):
    """Of the fits and their intervals: what is decided here is clear."""
    monkeypatch.setattr(growing_fits, "DRAWS", 20)
    monkeypatch.setattr(growing_fits, "depth_recursion", with_few_starts)


def grown_records(s=2.0, alpha=1 / 3):
    depths = range(1, 9)
    losses = {k: 1.0 + (3.0 ** (1 - s) + (s - 1) * 0.5 * k) ** (-1 / (s - 1)) for k in depths}
    found = [
        {
            "kind": kind,
            "seed": seed,
            "depth": k,
            "steps": 100 * k,
            "loss": (losses[k] if kind == "grown" else 3 + 0.5**k) + 0.0002 * seed,
            "gain": (losses[k] - 1) ** s,
            "parameters": 1,
        }
        for kind in ("grown", "alone")
        for seed in range(3)
        for k in depths
    ]
    return found + [
        {
            "kind": "coupled",
            "seed": seed,
            "depth": d,
            "steps": 1,
            "parameters": 1000 * d**3,
            "loss": 1 + 2 * (d**3) ** -alpha + 0.0002 * seed,
        }
        for seed in range(3)
        for d in (1, 2, 3, 5, 8)
    ]


def test_the_exponents_of_a_known_recursion_are_found():
    found = envelope(grown_records())
    assert found.s.value == pytest.approx(2, abs=0.1)
    assert found.foretold.value == pytest.approx(1 / 3, rel=0.1)
    assert found.measured.value == pytest.approx(1 / 3, rel=0.05)
    assert found.coupling == pytest.approx(2, abs=0.15)
    assert found.alone.s.value < 1.1
    assert envelope([one for one in grown_records() if one["depth"] < 4]) is None


def falling_records(grown, alone, noise=0.001):
    """Losses by stage, three seeds."""
    random = np.random.default_rng(0)
    return [
        {
            "part": "envelope",
            "kind": kind,
            "seed": seed,
            "depth": k if kind == "grown" else 1,
            "steps": 100 * k,
            "loss": 1 + law(k) + noise * random.normal(),
            "gain": 0.1,
            "parameters": 1,
        }
        for kind, law in (("grown", grown), ("alone", alone))
        for seed in range(3)
        for k in range(1, 9)
    ]


def power_law(k):
    return 1 / k


def exponential(k):
    return 0.7**k


@pytest.mark.parametrize(
    ("grown", "alone", "verdict"),
    [
        (power_law, exponential, "holds"),
        (power_law, power_law, "unclear"),  # steps alone do the same
        (exponential, exponential, "unclear"),
    ],
)
def test_a_power_law_of_depth_is_one_that_neither_an_exponential_nor_time_explains(grown, alone, verdict):
    records = falling_records(grown, alone)
    (found,) = [one for one in claims(records) if one.claim == "each block takes a power of what is left"]
    assert found.verdict == verdict
    assert f"of one block for the same steps {envelope(records).alone.s}" in found.here
    assert "may be training time" in notes(records)


def test_held_out_errors_are_of_stages_that_the_fits_have_not_seen():
    stage, unseen = np.arange(1.0, 9), np.where(np.arange(1, 9) > 6, 1.1, 1.0)
    for law, limit, other in ((exponential, True, 0.0), (power_law, True, 0.03), (power_law, False, 0.0)):
        loss = 1 + law(stage)
        assert growing_fits._error(stage, loss, exponential=limit) == pytest.approx(other, abs=0.01)
    # What is not seen changes errors, and not what is foretold.
    bent = growing_fits._error(stage, (1 + exponential(stage)) * unseen, exponential=True)
    assert bent == pytest.approx(math.log(1.1), abs=1e-3)


# Claims


def verdicts(records):
    return {claim.claim: claim.verdict for claim in claims(records)}


def test_exponents_that_agree_hold_and_others_fail():
    def told(alpha):
        records = [{**one, "part": "envelope"} for one in grown_records(alpha=alpha)]
        return verdicts(records)

    name = "s gives the exponent in parameters of networks from scratch"
    assert (told(1 / 3)[name], told(2.0)[name]) == ("holds", "fails")
    assert told(1 / 3)["a network grown block by block ends better than one block"] == "holds"


def growing_records(signal_ends):
    ends = {
        "none": 1.2,
        "scratch": 1.3,
        "even": 1.1,
        "stack": 1.15,
        "weakest": 1.12,
        "signal": signal_ends,
        "tried": 1.0,
        "jump": 1.0,
    }
    return [
        {
            "part": "growing",
            "seed": seed,
            "added": 2,
            "way": way,
            "before": 1.5,
            "steps": 10,
            "first": 1.9 if way == "stack" else 1.4 if way == "jump" else 1.5,
            "loss": end + 0.1 * seed + 0.001 * ((seed * 7 + len(way)) % 3),
            "curve": [[1e12, 1.5], [2e12, end + 0.1 * seed]],
            **extra,
        }
        for seed in range(3)
        for way, end, extra in [
            *((way, end, {"places": [0, 1]}) for way, end in ends.items()),
            *(("random", 1.1, {"draw": draw, "places": [draw, 3]}) for draw in range(2)),
        ]
    ]


def test_ways_are_compared_seed_by_seed():
    better, worse = verdicts(growing_records(1.0)), verdicts(growing_records(1.14))
    name = "the strongest places end better than random ones"
    assert (better[name], worse[name]) == ("holds", "fails")
    assert better["a block that jumps there ends better than one that starts at zero"] == "unclear"
    assert better["the jump alone lowers the loss"] == better["stacking forgets what was learned"] == "holds"


def test_paired_tests_of_the_ways_stand_together_or_not():
    """Nine tests: one at p 0.02 says nothing, one at p 0.0002 does."""
    records = [one for one in growing_records(1.0) if one["way"] not in ("weakest", "even")]
    template = next(one for one in records if one["way"] == "signal")
    ends = [one["loss"] for one in records if one["way"] == "signal"]
    for way, gaps in (("weakest", (0.10, 0.14, 0.19)), ("even", (0.100, 0.102, 0.101))):
        records += [
            {**template, "seed": seed, "way": way, "loss": ends[seed] + gap} for seed, gap in enumerate(gaps)
        ]
    found = {one.claim: one for one in claims(records)}
    weakest, even = (found[f"and better than {each}"] for each in ("the weakest", "evenly spaced ones"))
    assert stats.ttest_1samp((0.10, 0.14, 0.19), 0).pvalue == pytest.approx(0.0324, abs=1e-3)
    assert (weakest.verdict, even.verdict) == ("unclear", "holds")
    assert "does not stand among 9 tests" in weakest.here


def ranking_records(sign, second=1):
    generator = np.random.default_rng(1)
    return [
        {
            "part": "ranking",
            "seed": seed,
            "variant": variant,
            "order": order,
            "point": point,
            **dict.fromkeys(SIGNALS, 2.0**point),
            "gained": {str(m): sign * second**order * point + 0.1 * generator.normal() for m in (10, 100)},
        }
        for seed in range(3)
        for variant in ("new", "all")
        for order in (0, 1)
        for point in range(9)
    ]


def test_a_signal_that_ranks_holds_and_one_that_ranks_backwards_fails():
    name = "the gain ranks the points as 100 steps do, everything trained"
    up, down = verdicts(ranking_records(1)), verdicts(ranking_records(-1))
    assert (up[name], down[name]) == ("holds", "fails")
    ahead = "the strongest point gains more than the points do in the mean, the new block alone trained"
    assert (up[ahead], down[ahead]) == ("holds", "fails")
    alike = "two orders of the data rank them alike, everything trained"
    assert (down[alike], verdicts(ranking_records(1, second=-1))[alike]) == ("holds", "fails")


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "holds"), (100, "unclear"), (200, "fails")])
def test_certificates_are_judged_by_an_exact_interval(wrong, verdict):
    record = {
        "part": "coverage",
        "splits": "disjoint",
        "regime": "little",
        "method": "bernstein",
        "repetitions": 2000,
        "issued": 1000,
        "wrong": wrong,
        "above": 300,
        "lower": 0.0,
        "truth": 0.1,
    }
    found = verdicts([record, {**record, "regime": "much", "wrong": 0, "above": 0}])
    assert list(found.values()) == [verdict, "fails"]


def test_tables_and_figures_come_from_the_records():
    records = [
        *growing_records(1.0),
        *ranking_records(1),
        *({**one, "part": "envelope"} for one in grown_records()),
    ]
    said = notes(records)
    assert "0,3 1,3" in said
    assert said.count("+1.00 (+1.00 to +1.00)") >= 6
    drawn = dict(figures(records))
    assert set(drawn) == {"curves", "ranking", "envelope"}
    assert all(svg.endswith("</svg>\n") and "nan" not in svg for svg in drawn.values())


# The study


def test_cells_come_in_the_order_of_their_worth_and_are_known_again(tmp_path):
    order = [(cell["part"], cell.get("added")) for cell in cells(False)]
    assert order[:6] == [("growing", 2)] * 3 + [("ranking", None)] * 3
    assert len(SEEDS) >= 3
    assert FULL.repetitions >= 2000
    out, said = tmp_path / "growing.jsonl", []
    # With the names that real records have.
    others = {"way": "signal", "method": "betting", "kind": "grown", "variant": "new", "order": 0, "depth": 3}
    Records(out, {"study": "growing"}).append({**cell, **others} for cell in cells(False))
    # A cell that is not known again would fail at once.
    assert conduct(dataclasses.replace(STUDY, run=int), out, tell=said.append) == 0
    count = len(cells(False))
    assert said == [f"{count} of {count} cells are in {out}"]


def test_a_part_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["study", "growing", "--part", "growth"])
    assert "the study has no part 'growth': it has growing, ranking" in capsys.readouterr().err


def test_a_file_of_records_is_one_of_json(tmp_path, grown):
    for one in grown:
        assert json.loads(json.dumps(one, allow_nan=False)) == one
