"""What the Goldilocks study makes of records of training."""

import numpy as np
import pytest

from theodolite_studies.goldilocks.setting import TRAINED

from .made_up import JITTER, SEEDS, TS, claimed, course_record, falling, maps, with_zones, zone_record


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
