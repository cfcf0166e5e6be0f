"""Curvature and logits of the Goldilocks study before training, and during it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from theodolite.fleet.training import train
from theodolite.probes.curvature.curvature import Projection, curvature
from theodolite.probes.curvature.rescaling import scaled
from theodolite_studies.goldilocks.curvature import (
    NetworkStart,
    _seen_trace,
    course,
    epochs_of_looks,
    logit_curve,
    scale_curves,
    scale_rows,
    temperature_curve,
)
from theodolite_studies.goldilocks.setting import GoldilocksSetting
from theodolite_studies.goldilocks.training import MapCell

from .tiny import LENET, RESNET

SETTING = GoldilocksSetting(
    points=5, batch=32, directions=8, epochs=40, images=60, tested=30, looks=4, precision="float32"
)


def start(network, column, seed=0):
    return NetworkStart.made(network, column, seed, num=SETTING.batch, device="cpu")


def zone_curve(mine, row, setting):
    return temperature_curve(mine, setting) if row == "temperature" else scale_curves(mine, setting)[row]


def excess(network, column, row, seed=0):
    return np.array(zone_curve(start(network, column, seed), row, SETTING)["excess"])


@pytest.mark.parametrize("network", [LENET, RESNET], ids=lambda network: network.name)
def test_a_homogeneous_network_is_flat_under_joint_scaling_and_alpha_mirrors_temperature(network):
    joint = excess(network, "A", "joint")
    np.testing.assert_allclose(joint, joint[2], rtol=1e-3)
    alpha, temperature = excess(network, "A", "alpha"), excess(network, "A", "temperature")
    np.testing.assert_allclose(alpha, temperature[::-1], atol=1e-3)
    assert alpha[2] == pytest.approx(joint[2], rel=1e-3)
    assert np.ptp(alpha) > 0.2


@pytest.mark.parametrize(
    "network, column, row, power",
    [
        (LENET, "B", "alpha", 0),
        (LENET, "B", "joint", 3),
        (LENET, "D", "joint", 1),
        (RESNET, "C", "joint", 4),
        (RESNET, "C", "identity", 2),
        (RESNET, "E", "joint", 1),
    ],
)
def test_each_row_has_the_temperature_that_the_paper_gives_it(network, column, row, power):
    mine = start(network, column, seed=3)
    found = zone_curve(mine, row, SETTING)
    assert found["at"] == [-3.0, -1.5, 0.0, 1.5, 3.0]
    with scaled(mine.model, 10**-1.5):
        expected = curvature(
            mine.model, cross_entropy, mine.batch, directions=8, temperature=10 ** (-1.5 * power), seed=3
        )
    assert found["excess"][1] == pytest.approx(expected.excess, rel=1e-3)
    assert found["t"][1] == pytest.approx(expected.t.value, rel=1e-3)
    assert found["loss"][1] == pytest.approx(expected.loss, rel=1e-3)
    norms = expected.gauss_newton.frobenius.value, expected.residual.frobenius.value
    assert (found["frobenius of G"][1], found["frobenius of S"][1]) == pytest.approx(norms, rel=1e-3)


def test_only_networks_with_an_identity_path_have_its_row():
    assert {column: "identity" in scale_rows(column) for column in "ABCDE"} == {
        "A": False,
        "B": False,
        "C": True,
        "D": False,
        "E": True,
    }


def test_a_seed_redraws_weights_directions_and_images():
    first, second = start(LENET, "A", 0), start(LENET, "A", 1)
    assert not torch.equal(first.batch[0], second.batch[0])
    weights = [next(each.model.parameters()) for each in (first, second)]
    assert not torch.equal(*weights)
    assert weights[0].dtype == torch.float64
    same = dataclasses.replace(first, seed=1)  # other directions alone
    assert zone_curve(same, "alpha", SETTING)["excess"] != zone_curve(first, "alpha", SETTING)["excess"]


def test_the_start_is_what_a_run_with_this_seed_starts_from():
    run = MapCell("temperature", LENET, "B", "temperature", 0.5, -2.0, 4).run(SETTING)
    outcome = train(run, LENET.workload("B", images=60, tested=30))
    inputs, labels = LENET.workload("B", images=60, tested=30).draw(0, 0)
    model = LENET.start("B", 4)
    first = cross_entropy(model(inputs) / 10**0.5, labels).item()
    assert outcome.metrics["loss"][0] == (0, pytest.approx(first, rel=1e-6))


def test_logits_of_a_homogeneous_network_miss_by_the_other_powers_of_alpha():
    found = logit_curve(start(LENET, "A"), SETTING)
    expected = [abs(10 ** (2 * at) - 1) for at in found["at"]]  # α³ instead of α
    assert found["error"] == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert found["kl"][2] == pytest.approx(0, abs=1e-12)
    assert found["kl"][1] > 1e-4


def test_kl_is_that_from_the_expected_to_the_found_probabilities():
    mine, setting = start(LENET, "B"), dataclasses.replace(SETTING, points=13)
    inputs, _ = mine.batch
    with torch.no_grad():
        expected = (10**0.5 * mine.model(inputs)).softmax(-1)
        with scaled(mine.model, 10**0.5):
            found = mine.model(inputs).softmax(-1)
    pairs = list(zip(expected.flatten().tolist(), found.flatten().tolist(), strict=True))
    by_hand = sum(p * math.log(p / q) for p, q in pairs) / 32
    other_way = sum(q * math.log(q / p) for p, q in pairs) / 32
    assert abs(other_way / by_hand - 1) > 0.1
    measured = logit_curve(mine, setting)
    assert measured["at"][7] == 0.5
    assert measured["kl"][7] == pytest.approx(by_hand, rel=1e-3)


def test_the_trace_is_seen_by_the_directions_alone():
    matrix = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    trace, error = _seen_trace(Projection(matrix, None, None, None), size=10)
    assert trace == pytest.approx(5 * 4.0)
    assert error == pytest.approx(5 * math.sqrt(2) * math.sqrt(2))


def test_the_course_is_that_of_the_run_and_begins_with_the_curvature_of_the_start():
    setting = dataclasses.replace(SETTING, seeds=(1,))
    found = course(RESNET, "C", 0.0, 1, setting, "cpu")
    run = MapCell("temperature", RESNET, "C", "temperature", 0.0, -2.0, 1).run(setting)
    outcome = train(run, RESNET.workload("C", images=60, tested=30))
    assert found["at"] == [0, 1, 3, 12, 40]
    assert found["train"][-1] == pytest.approx(outcome.readings["train accuracy"], abs=1e-4)
    assert found["train loss"][0] == pytest.approx(outcome.metrics["loss"][0][1], rel=1e-4)
    assert found["train loss"][-1] < 0.5 * found["train loss"][0]
    at_start = zone_curve(start(RESNET, "C", 1), "temperature", SETTING)
    assert found["excess"][0] == pytest.approx(at_start["excess"][2], rel=1e-3)
    assert found["excess"][-1] != found["excess"][0]


def test_a_course_that_diverges_ends(monkeypatch):
    monkeypatch.setattr("theodolite_studies.goldilocks.curvature.RATE", 20.0)
    found = course(LENET, "A", 0.0, 0, SETTING, "cpu")
    assert found["at"] in ([0], [0, 1], [0, 1, 3])
    assert len(found["excess"]) == len(found["train"]) == len(found["at"])


def test_looks_begin_with_the_start_and_end_with_the_end():
    assert epochs_of_looks(GoldilocksSetting(epochs=1, looks=1)) == (0, 1)
    assert epochs_of_looks(GoldilocksSetting(epochs=1000, looks=4)) == (0, 1, 10, 100, 1000)
