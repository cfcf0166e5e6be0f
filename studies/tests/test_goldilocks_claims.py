"""What the Goldilocks study makes of its records: zones, verdicts, claims."""

import math

import numpy as np
import pytest

from theodolite_studies.framework.verdict import Case, settled, table, tally
from theodolite_studies.goldilocks.curves import accuracies, curve, zone
from theodolite_studies.goldilocks.networks import NETWORKS, TRAINED
from theodolite_studies.goldilocks.setting import Setting
from theodolite_studies.goldilocks.training_claims import training_claims
from theodolite_studies.goldilocks.zone_claims import projected_excess, zone_claims

SETTING = Setting(points=7)
SEEDS = (0, 1, 2)
JITTER = 1e-3


def bump(at, centre=0.0, peak=3.0, width=1.0):
    return peak * np.exp(-(((np.asarray(at) - centre) / width) ** 2))


def zone_record(network, column, row, at, excess, seed, **others):
    t = excess * 1.5
    share = (excess + 4) / 12
    values = {
        "excess": excess + JITTER * seed,
        "t": t,
        "excess of S": excess - 0.1,
        "trace of S": 0 * excess,
        "trace of S error": 0 * excess + 1.0,
        "frobenius of G": share / (1 - share),
        "frobenius of S": 0 * excess + 1.0,
        **others,
    }
    return {
        "part": "zone",
        "network": network,
        "column": column,
        "row": row,
        "seed": seed,
        "at": list(at),
        **{name: list(np.asarray(value, dtype=float)) for name, value in values.items()},
    }


def as_the_paper_says():
    """Records of the LeNet on Fashion-MNIST and of the ResNet, in which every claim holds."""
    records = []
    alphas = np.array(SETTING.alphas())
    for name in ("lenet300-fashion", "resnet4-fashion"):
        network = NETWORKS[name]
        temperatures = np.array(SETTING.temperatures(network))
        for column in network.columns:
            normed = column in ("D", "E")
            peak = 1.0 if normed else 3.0
            along = bump(temperatures, centre=0.5, peak=peak, width=2.0)
            alpha = along[::-1].copy()
            joint = np.full(7, peak)
            others = {"trace of S": np.full(7, -9.0)} if normed else {}
            if normed:
                along[0] = alpha[-1] = -2.0
            if column in ("B", "C", "E"):
                joint = np.where(alphas < 0, 0.1, peak)
                if column != "E":
                    alpha = bump(alphas * network.layers - 3, peak=peak, width=2.0)
            if column == "C":
                joint[:2] = (0.0, 2.0)
            for seed in SEEDS:
                rows = {"alpha": alpha, "temperature": along, "joint": joint}
                if column in ("C", "E"):
                    rows["identity"] = np.full(7, peak)
                for row, excess in rows.items():
                    at = temperatures if row == "temperature" else alphas
                    t = excess / math.sqrt(50) * math.sqrt(51) / np.sqrt(1 - excess**2 / 50)
                    records.append(zone_record(name, column, row, at, excess, seed, t=t, **others))
                if normed:
                    records.append(
                        {
                            "part": "logits",
                            "network": name,
                            "column": column,
                            "seed": seed,
                            "at": list(alphas),
                            "kl": [1.0, 1.0, 1e-6, 0.0, 0.0, 0.0, 0.0],
                            "error": [0.9, 0.5, 1e-3, 0.0, 0.0, 0.0, 0.0],
                        }
                    )
    return records


def claimed(records, start):
    (found,) = [
        claim for claim in [*zone_claims(records, SETTING), *training_claims(records)] if claim.claim == start
    ]
    return found


def test_where_all_is_as_the_paper_says_every_claim_holds():
    found = list(zone_claims(as_the_paper_says(), SETTING))
    assert [claim.claim for claim in found if claim.verdict != "holds"] == []
    assert len(found) == 21


def changed(records, row, columns, change, name="excess"):
    """The records with one array of some curves changed."""
    return [
        {**record, name: list(change(np.array(record[name]), record["seed"]))}
        if record.get("row") == row and record["column"] in columns
        else record
        for record in records
    ]


def at_place(place, value):
    def change(values, seed):
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    "claim, row, columns, change, name",
    [
        (
            "A–E: a zone along T: the excess falls off to both sides of a peak",
            "temperature",
            "B",
            at_place(-1, 2.0),
            "excess",
        ),
        (
            "A–E: a zone along α: the excess falls off to both sides of a peak",
            "alpha",
            "E",
            at_place(0, 0.6),
            "excess",
        ),
        ("A: flat under joint scaling, T = α^L", "joint", "A", at_place(2, 3.5), "excess"),
        (
            "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)",
            "joint",
            "D",
            at_place(-1, 1.5),
            "excess",
        ),
        ("B: joint scaling fails for small α", "joint", "B", at_place(0, 1.9), "excess"),
        ("E: joint scaling fails for small α", "joint", "E", at_place(0, 0.9), "excess"),
        ("C: T = α^(L−ℒ) is flat for small α", "identity", "C", at_place(0, 2.5), "excess"),
        ("C: T = α^L is not", "joint", "C", at_place(slice(0, 3), 1.0), "excess"),
        ("A: α does what T = α^-L does", "alpha", "A", at_place(2, 2.0), "excess"),
        ("D, E: the peak along T is lower than A's", "temperature", "D", at_place(3, 3.5), "excess"),
        ("D, E: much lower", "temperature", "E", at_place(3, 2.0), "excess"),
        ("D, E: the excess is negative somewhere", "alpha", "D", lambda v, s: abs(v) + 0.1, "excess"),
        ("A–C: Tr(S) = 0, ReLU networks without norms", "temperature", "C", lambda v, s: v + 4, "trace of S"),
        ("D, E: Tr(S) < 0, LayerNorm", "temperature", "D", lambda v, s: 0 * v, "trace of S"),
        (
            "D, E: where the excess is negative, so is that of S",
            "temperature",
            "D",
            at_place(0, 0.2),
            "excess of S",
        ),
        (
            "A–E: along T the excess goes with the share of G",
            "temperature",
            "A",
            lambda v, s: v[::-1] + np.arange(7),
            "frobenius of G",
        ),
        (
            "A–E: the projected excess is √d·t/√(t² + d + 1), which saturates at √d",
            "joint",
            "B",
            lambda v, s: 2 * v,
            "t",
        ),
    ],
)
def test_a_claim_fails_where_its_threshold_is_crossed(claim, row, columns, change, name):
    records = changed(as_the_paper_says(), row, columns, change, name)
    if claim == "D, E: the excess is negative somewhere":
        records = changed(records, "temperature", columns, change)
    assert claimed(records, claim).verdict == "fails"


def test_flat_is_by_the_measure_of_the_homogeneous_peak():
    nearly = changed(as_the_paper_says(), "joint", "D", at_place(-1, 1.25))  # 0.25 of A's 3 is less than 0.1
    claim = "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)"
    assert claimed(nearly, claim).verdict == "holds"


def test_seeds_that_disagree_leave_a_claim_unclear():
    noisy = changed(as_the_paper_says(), "joint", "A", lambda v, seed: at_place(0, 3.0 + 0.6 * seed)(v, seed))
    assert claimed(noisy, "A: flat under joint scaling, T = α^L").verdict == "unclear"
    alone = [record for record in as_the_paper_says() if record["seed"] == 0]
    assert {claim.verdict for claim in zone_claims(alone, SETTING)} <= {"unclear", "fails"}


def test_what_is_not_there_is_not_judged():
    only = [record for record in as_the_paper_says() if record["column"] == "A"]
    found = [claim.claim for claim in zone_claims(only, SETTING)]
    assert "A: flat under joint scaling, T = α^L" in found
    assert not [claim for claim in found if claim.startswith(("B", "C", "D, E"))]


@pytest.mark.parametrize(
    "excess, low, high",
    [
        ([0, 1, 2, 1, 0], -1.0, 1.0),
        ([0, 0, 4, 3, 1], -1 + 0.5, 1.5),
        ([3, 3, 4, 0, 3], -math.inf, 0.5),  # what lies apart does not belong to it
        ([2, 2, 2, 2, 2], -math.inf, math.inf),
    ],
)
def test_a_zone_reaches_down_to_half_of_its_peak(excess, low, high):
    records = [zone_record("lenet300-fashion", "A", "alpha", range(-2, 3), np.array(excess, float), 0)]
    found = zone(curve(records, row="alpha"))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_without_positive_curvature_there_is_no_zone():
    records = [zone_record("lenet300-fashion", "D", "alpha", range(3), np.array([-1.0, 0.0, -2.0]), 0)]
    assert zone(curve(records, row="alpha")) is None


def test_the_zone_is_that_of_the_seeds_mean():
    records = [
        zone_record("lenet300-fashion", "A", "alpha", range(3), np.array(excess, float), seed)
        for seed, excess in enumerate([[0.0, 4.0, 4.0], [0.0, 4.0, -4.0]])
    ]
    found = zone(curve(records, row="alpha"))
    assert (found.low, found.high) == (pytest.approx(0.5, abs=1e-3), pytest.approx(1.5, abs=1e-3))


def test_excess_saturates():
    assert projected_excess(np.array([0.0, 1e6]), 50) == pytest.approx([0.0, math.sqrt(50)])
    assert projected_excess(np.array([5.0]), 50) == pytest.approx([math.sqrt(50) * 5 / math.sqrt(76)])


TS = (-9.0, -4.0, -1.0, 0.0, 1.0, 2.0, 4.0, 9.0)


def maps(part, column, train, *, rule="temperature", seed=0, at=TS, test=None):
    """`train(T)` at the better of two rates; the other diverges."""
    return [
        {
            "part": part,
            "network": TRAINED[column].name,
            "column": column,
            "rule": rule,
            "at": place,
            "seed": seed,
            "rates": [-2.0, -1.0],
            "train": [train(place), None],
            "test": [(test or train)(place), None],
        }
        for place in at
    ]


def with_zones(trained):
    """The records with zones from T = 0.1 to 10."""
    found = list(trained)
    for column, network in TRAINED.items():
        for seed in SEEDS:
            excess = np.array([0.0, 0.0, 2.0, 2.0, 2.0, 0.0, 0.0])
            at = (-9, -1.01, -1, 0, 1, 1.01, 9)
            found.append(zone_record(network.name, column, "temperature", at, excess, seed))
    return found


def falling(place):
    return 0.9 if abs(place) <= 1 else 0.9 - 0.1 * abs(place) / 2


def test_a_run_that_diverged_is_at_chance():
    found = accuracies(maps("temperature", "A", falling), part="temperature", column="A")
    assert found.train.shape == (1, 8, 2)
    assert found.train[0, :, 1].tolist() == [0.1] * 8
    assert found.diverged[0].tolist() == [[False, True]] * 8
    assert found.best()[0, 3] == 0.9


@pytest.mark.parametrize(
    "train, verdict", [(falling, "holds"), (lambda place: 0.95 if place == -9 else falling(place), "fails")]
)
def test_the_best_accuracy_is_inside_the_zone_or_not(train, verdict):
    records = with_zones(
        record
        for seed in SEEDS
        for column in "ABC"
        for record in maps("temperature", column, train, seed=seed)
    )
    assert claimed(records, "A–C: the best train accuracy is inside the zone").verdict == verdict
    assert claimed(records, "A–C: the best test accuracy is inside the zone").verdict == verdict


def test_norms_train_outside_the_zone():
    def steady(place):
        return 0.9 if place < 2 else 0.885 if place < 9 else 0.5

    norms = [
        record
        for seed in SEEDS
        for column in "DE"
        for record in maps("temperature", column, steady, seed=seed)
    ]
    others = [record for seed in SEEDS for record in maps("temperature", "C", falling, seed=seed)]
    records = with_zones([*norms, *others])
    for claim in (
        "D, E: LayerNorm reaches its best accuracy outside the zone too",
        "D, E: and does so at most temperatures outside",
        "D, E: good at more temperatures than C",
    ):
        assert claimed(records, claim).verdict == "holds"
    worse = with_zones(
        record
        for seed in SEEDS
        for column in "DE"
        for record in maps("temperature", column, falling, seed=seed)
    )
    assert claimed(worse, "D, E: LayerNorm reaches its best accuracy outside the zone too").verdict == "fails"
    assert claimed(worse, "D, E: and does so at most temperatures outside").verdict == "fails"


def test_norms_without_a_zone_are_outside_of_it_everywhere():
    trained = [record for seed in SEEDS for record in maps("temperature", "D", falling, seed=seed)]
    negative = [
        zone_record(TRAINED["D"].name, "D", "temperature", (-9, 0, 9), np.array([-1.0, -0.1, -1.0]), seed)
        for seed in SEEDS
    ]
    claim = "D, E: LayerNorm reaches its best accuracy outside the zone too"
    assert claimed(trained + negative, claim).verdict == "holds"


def test_c_declines_more_sharply_than_b():
    def steep(place):
        return falling(place) if place <= 1 else 0.2

    def records(of_c):
        return with_zones(
            record
            for seed in SEEDS
            for column, train in (("B", falling), ("C", of_c))
            for record in maps("temperature", column, train, seed=seed)
        )

    claim = "C declines more sharply above the zone than B, LeNet-300-100"
    assert claimed(records(steep), claim).verdict == "holds"
    # 2 and 4 lie in the three decades above the zone, where both fall to 0.8 and 0.7
    assert "0.55" in claimed(records(steep), claim).here
    assert claimed(records(falling), claim).verdict == "fails"


def test_test_accuracy_mirrors_train_accuracy():
    same = [record for seed in SEEDS for record in maps("temperature", "A", falling, seed=seed)]
    claim = "A–E: test accuracy mirrors train accuracy"
    assert claimed(same, claim).verdict == "holds"
    other = [
        record
        for seed in SEEDS
        for record in maps("temperature", "A", falling, seed=seed, test=lambda place: 0.1 + abs(place) / 12)
    ]
    assert claimed(other, claim).verdict == "fails"


def test_alpha_trains_as_its_temperature_does():
    tempered = [
        record
        for seed in SEEDS
        for record in maps("temperature", "A", lambda place: 0.5 + place / 20, seed=seed)
    ]
    alphas = [-place / 3 for place in reversed(TS)]
    claim = "A: α trains as T = α^-L does"
    for sign, verdict in ((-1, "holds"), (1, "fails")):
        scaled = [
            record
            for seed in SEEDS
            for record in maps(
                "scale",
                "A",
                lambda place, sign=sign: 0.5 + sign * 3 * place / 20,
                rule="homogeneous",
                seed=seed,
                at=alphas,
            )
        ]
        assert claimed(tempered + scaled, claim).verdict == verdict


def test_adam_beside_descent():
    records = [
        record
        for seed in SEEDS
        for column in "ABCDE"
        for record in (
            *maps("temperature", column, falling, seed=seed),
            *maps("adam", column, lambda place: 0.9, rule="adam", seed=seed),
        )
    ]
    claim = "A–E: Adam is good at more temperatures than gradient descent"
    assert claimed(records, claim).verdict == "holds"
    swapped = [
        {**record, "part": {"adam": "temperature", "temperature": "adam"}[record["part"]]}
        for record in records
    ]
    assert claimed(swapped, claim).verdict == "fails"


def course_record(column, at, excess, share, seed):
    return {
        "part": "course",
        "network": TRAINED[column].name,
        "column": column,
        "temperature": at,
        "seed": seed,
        "at": [0, 10, 100],
        "excess": list(excess),
        "frobenius of G": list(share),
        "frobenius of S": [1.0, 1.0, 1.0],
        "train": [0.1, 0.5, 0.9],
    }


@pytest.mark.parametrize("last, verdict", [(1.5, "holds"), (0.5, "fails")])
def test_training_from_outside_leads_into_the_zone(last, verdict):
    courses = [course_record("A", 4.0, (0.0, 1.0, last + JITTER * seed), (1, 1, 1), seed) for seed in SEEDS]
    claim = "A–C: training from outside leads into the zone"
    assert claimed(with_zones(courses), claim).verdict == verdict


@pytest.mark.parametrize("last, verdict", [(3.0, "holds"), (0.3, "fails")])
def test_training_from_inside_makes_g_prevail(last, verdict):
    courses = [course_record("E", 0.0, (1, 1, 1), (1.0, 2.0, last + JITTER * seed), seed) for seed in SEEDS]
    claim = "A–E: from inside, training makes G prevail over S"
    assert claimed(courses, claim).verdict == verdict


def test_the_case_nearest_to_failing_is_shown_and_one_failure_fails_the_claim():
    good, bad = Case("good", np.array([1.0, 1.1])), Case("bad", np.array([3.0, 3.1]))
    found = settled("c", "p", "t", [good, bad], limit=2.0, below=True)
    assert (found.verdict, found.here) == ("fails", "3.05 ± 0.05 (bad, 1 of 2 hold)")
    assert settled("c", "p", "t", [good], limit=2.0, below=False).verdict == "fails"
    assert settled("c", "p", "t", [bad], limit=2.0, below=False).verdict == "holds"
    assert "bad" in table([found])
    assert tally([found, found]) == "0 of 2 claims hold, 2 fail, none is unclear."
