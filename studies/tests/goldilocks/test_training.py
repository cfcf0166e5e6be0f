"""The runs of the Goldilocks study and its learning-rate rules."""

import dataclasses
from collections import Counter

import pytest

from theodolite.fleet.training import train
from theodolite_studies.goldilocks.setting import FULL, TRAINED, GoldilocksSetting
from theodolite_studies.goldilocks.setting import RESNET as REAL_RESNET
from theodolite_studies.goldilocks.training import (
    TRAINING_PARTS,
    MapCell,
    exponent_of_rate,
    map_cells,
    run_records,
    runs_of_a_map,
)

from .tiny import LENET, RESNET

TINY = GoldilocksSetting(epochs=12, images=60, tested=30, precision="float32")


def outcome(cell):
    return train(cell.run(TINY), cell.network.workload(cell.column, images=60, tested=30))


@pytest.mark.parametrize("network", [LENET, RESNET], ids=lambda network: network.name)
@pytest.mark.parametrize("alpha", [-0.25, 0.5])
def test_a_homogeneous_network_trains_from_alpha_theta_as_it_does_at_its_temperature(network, alpha):
    """f(αθ) = α^L f(θ) at every step, if the learning rate is α^{2−L}·η₀ there and T·η₀ at T = α^-L."""
    scaled = MapCell("scale", network, "A", "homogeneous", alpha, -1.5, 2)
    tempered = MapCell("temperature", network, "A", "temperature", -network.layers * alpha, -1.5, 2)
    mine, other = outcome(scaled), outcome(tempered)
    assert mine.held_out == pytest.approx(other.held_out, rel=1e-4)
    (_, first), (_, last) = mine.metrics["loss"]
    assert [first, last] == pytest.approx([loss for _, loss in other.metrics["loss"]], rel=1e-4)
    assert last < 0.98 * first
    assert mine.readings["train accuracy"] == other.readings["train accuracy"]


def test_learning_rates_follow_appendix_g():
    four = REAL_RESNET  # L = 4, two layers in the branch
    assert exponent_of_rate("temperature", four, 3.0, -1.0) == 2.0
    assert exponent_of_rate("homogeneous", four, 3.0, -1.0) == -7.0
    assert exponent_of_rate("identity", four, 3.0, -1.0) == -1.0
    assert exponent_of_rate("normed", four, 3.0, -1.0) == 2.0
    assert exponent_of_rate("adam", four, 3.0, -1.0) == -1.0


def test_each_part_has_its_columns_rules_and_grid():
    shown = {part: map_cells(part, FULL) for part in TRAINING_PARTS}
    assert {part: len(found) for part, found in shown.items()} == {
        "temperature": 5 * 13 * 7 * 3,
        "scale": 5 * 13 * 7 * 3 + 6 * 7 * 3,
        "adam": 5 * 13 * 7 * 3,
        "neighbours": 3 * 13 * 7 * 3,
    }
    rules = {(cell.column, cell.rule) for cell in shown["scale"]}
    assert rules == {
        ("A", "homogeneous"),
        ("B", "homogeneous"),
        ("C", "homogeneous"),
        ("C", "identity"),
        ("D", "normed"),
        ("E", "normed"),
    }
    assert max(cell.at for cell in shown["scale"] if cell.rule == "identity") < 0
    assert {cell.network for cell in shown["neighbours"]} == {REAL_RESNET}
    assert {cell.column: cell.network for cell in shown["temperature"]} == dict(TRAINED)
    assert max(cell.at for cell in shown["temperature"] if cell.column == "C") == 12
    assert max(cell.at for cell in shown["temperature"] if cell.column == "A") == 9
    assert runs_of_a_map("temperature", FULL) == 91


def test_the_tamest_run_comes_first():
    first = map_cells("temperature", FULL)[0]
    assert (first.at, first.rate) == (0.0, -3.0)


def test_descent_is_plain_and_adam_keeps_eps_in_proportion_to_the_gradient():
    plain = MapCell("temperature", LENET, "A", "temperature", 2.0, -1.0, 0).run(FULL)
    assert (plain.optimizer, plain.schedule, plain.weight_decay, dict(plain.options)) == (
        "sgd",
        "constant",
        0,
        {},
    )
    assert (plain.lr, plain.temperature, plain.init_scale) == (pytest.approx(10.0), 100.0, 1.0)
    adam = MapCell("adam", LENET, "A", "adam", 2.0, -3.0, 0).run(FULL)
    assert (adam.optimizer, adam.lr, adam.temperature) == ("adamw", pytest.approx(1e-3), 100.0)
    assert adam.eps == pytest.approx(1e-10)
    scaled = MapCell("scale", LENET, "B", "homogeneous", 2.0, -1.0, 0).run(FULL)
    assert (scaled.init_scale, scaled.temperature) == (100.0, 1.0)


def test_alpha_and_temperature_of_one_are_the_same_run():
    identities = Counter(
        cell.run(FULL).identity
        for part in ("temperature", "scale")
        for cell in map_cells(part, FULL)
        if not cell.at
    )
    assert set(identities.values()) == {2}


def test_records_hold_every_rate_and_none_where_a_run_diverged():
    setting = dataclasses.replace(TINY, inner=(0,), rates=(-2.0, -1.0), seeds=(5,))
    rows = []
    for cell in map_cells("temperature", setting):
        burst = cell.rate == -1.0 and cell.at > 0
        rows.append(
            {
                "identity": cell.run(setting).identity,
                "seed": 5,
                "status": "diverged" if burst else "finished",
                **({} if burst else {"train accuracy": 0.5 + cell.at / 100, "accuracy": 0.123456}),
            }
        )
    records = [record for record in run_records(setting, rows) if record["part"] == "temperature"]
    assert len(records) == 5 * 3
    (hot,) = [record for record in records if (record["column"], record["at"]) == ("A", 9.0)]
    assert hot == {
        "part": "temperature",
        "network": "lenet300-fashion",
        "column": "A",
        "rule": "temperature",
        "at": 9.0,
        "seed": 5,
        "rates": [-2.0, -1.0],
        "train": [0.59, None],
        "test": [0.1235, None],
    }
    gone = rows[0]["identity"]
    fewer = run_records(setting, [row for row in rows if row["identity"] != gone])
    assert len([record for record in fewer if record["part"] == "temperature"]) == 4 * 3
    # α = 1 is T = 1, but no map of the other parts is whole.
    assert {record["part"] for record in run_records(setting, rows)} == {"temperature"}
