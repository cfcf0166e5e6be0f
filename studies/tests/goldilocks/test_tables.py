"""The tables of the Goldilocks study."""

from theodolite_studies.goldilocks.curves import Measured
from theodolite_studies.goldilocks.setting import FULL
from theodolite_studies.goldilocks.tables import courses, trained


def accuracy_record(column, at, train, seed):
    key = {"part": "temperature", "rule": "temperature", "network": "lenet300-fashion", "column": column}
    return key | {"at": at, "seed": seed, "rates": [-2.0, -1.0], "train": train, "test": train}


def test_the_table_of_accuracies_takes_the_best_rate_of_each_seed():
    records = [
        accuracy_record("A", 0.0, [0.6, 0.8], 0),
        accuracy_record("A", 0.0, [1.0, None], 1),
        accuracy_record("A", 2.0, [0.2, 0.3], 0),
        accuracy_record("A", 2.0, [0.4, 0.1], 1),
    ]
    _, head, _, train, test = trained(Measured(records, FULL)).splitlines()
    assert head.split() == ["descent,", "T", "=", "10^0", "10^2", "mean", "diverged"]
    # Best of each seed: 0.8 and 1.0; 0.3 and 0.4. One of eight diverged, and counts as 0.1 in the mean.
    assert train.split() == ["A,", "train", "0.900", "0.350", "0.438", "12%"]
    assert test.split() == ["A,", "test", *train.split()[2:]]


def test_the_table_of_courses_goes_from_the_first_look_to_the_last():
    key = {"part": "course", "column": "B", "temperature": 0.0}
    records = [
        key | {"seed": 0, "at": [0, 1, 10], "excess": [1.0, 9.0, 3.0]},
        key | {"seed": 1, "at": [0, 1, 10], "excess": [2.0, 9.0, 5.0]},
    ]
    head, _, line = courses(Measured(records, FULL)).splitlines()
    assert line.split() == ["B", "1.50", "→", "4.00"]
    assert head.split() == ["excess,", "T", "=", "10^0"]
