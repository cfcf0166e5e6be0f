"""The workload of two cylinders: its loss and metrics, that it learns, and that it can be planned."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from theodolite import Size, dissect, plan, workload
from theodolite.data import cylinder_flows
from theodolite.fleet import Resources, Run, serial
from theodolite.workloads.two_cylinders import METRICS, fluid_loss, relative_error

WORKLOAD = workload("two-cylinders")


class Known(nn.Module):
    """Predicts a share of the correction of known flows, and nonsense inside their cylinders."""

    def __init__(self, flows, share: float) -> None:
        super().__init__()
        self.output = share * flows.correction + 7 * (1 - flows.fluid)

    def forward(self, coarse: Tensor) -> Tensor:
        return self.output[: len(coarse)]


@pytest.mark.parametrize(("share", "error"), [(1.0, 0.0), (0.25, 0.75), (0.0, 1.0), (3.0, 2.0)])
def test_the_metric_is_the_part_of_the_correction_that_is_missed(share: float, error: float) -> None:
    flows = cylinder_flows(6, "hole", seed=4)
    assert relative_error(Known(flows, share), flows) == pytest.approx(error, abs=1e-6)


def test_the_loss_counts_errors_in_the_fluid_alone() -> None:
    torch.manual_seed(0)
    predicted, truth = torch.randn(2, 3, 2, 5, 5, dtype=torch.float64)
    fluid = (torch.rand(3, 1, 5, 5) < 0.7).double()
    total = 0.0
    for n, c, i, j in torch.cartesian_prod(*map(torch.arange, predicted.shape)).tolist():
        total += fluid[n, 0, i, j].item() * (predicted[n, c, i, j] - truth[n, c, i, j]).item() ** 2
    assert fluid_loss(predicted, (truth, fluid)).item() == pytest.approx(total / predicted.numel())


def test_each_metric_has_gaps_that_training_has_not_or_flows_that_it_has_not() -> None:
    trained = {flow.gap for flow in cylinder_flows(256).flows}
    assert list(WORKLOAD.metrics) == list(METRICS)
    low, high = (0.5, 1.0), (2.0, 2.5)
    allowed = {"error inside": [low, high], "error in the hole": [(1.0, 2.0)]}
    allowed |= {"error narrower": [(0.2, 0.5)], "error wider": [(2.5, 3.0)]}
    for name, metric in WORKLOAD.metrics.items():
        seen: list[Tensor] = []

        class Looking(nn.Module):
            def forward(self, coarse: Tensor) -> Tensor:
                seen.append(coarse)  # noqa: B023
                return torch.zeros(len(coarse), 2, 64, 64)

        assert metric(Looking()) == pytest.approx(1)
        flows = cylinder_flows(128, METRICS[name], seed=1)
        assert torch.equal(seen[0], flows.coarse)
        gaps = [flow.gap for flow in flows.flows]
        assert all(any(least <= gap <= most for least, most in allowed[name]) for gap in gaps)
        assert not trained & {*gaps}


def test_a_batch_has_distinct_flows_and_depends_on_seed_and_step_alone() -> None:
    inputs, (correction, fluid) = WORKLOAD.batch(3, 5)
    again, _ = WORKLOAD.batch(3, 5)
    assert torch.equal(inputs, again)
    assert len({each.numpy().tobytes() for each in inputs}) == len(inputs) == 32
    known = {each.numpy().tobytes(): number for number, each in enumerate(cylinder_flows(256).coarse)}
    rows = [known[each.numpy().tobytes()] for each in inputs]
    assert torch.equal(correction, cylinder_flows(256).correction[rows])
    assert torch.equal(fluid, cylinder_flows(256).fluid[rows])
    assert not torch.equal(inputs, WORKLOAD.batch(3, 6)[0])
    assert not torch.equal(inputs, WORKLOAD.batch(4, 5)[0])


def test_it_learns_more_than_interpolation_knows() -> None:
    """In every region, as all of them have the same shapes near a surface."""
    (outcome,) = serial([_run(steps=200, lr=2**-7)], Resources())
    assert outcome.status == "finished"
    assert outcome.readings.keys() >= METRICS.keys()
    assert all(outcome.readings[name] < 0.75 for name in METRICS)


def test_a_run_measures_the_metrics_of_its_network() -> None:
    run = _run(steps=1, lr=1e-12)
    (outcome,) = serial([run], Resources())
    untrained = _plan(16).build(run.seed)
    for name, region in METRICS.items():
        error = relative_error(untrained, cylinder_flows(128, region, seed=1))
        assert math.isfinite(error)
        assert outcome.readings[name] == pytest.approx(error, rel=1e-4)


def test_its_convolutions_have_the_roles_and_the_plan_of_width() -> None:
    """Roles by what grows: one side, both, or the input side of the readout. Rates: muP for Adam."""
    inputs = WORKLOAD.batch(0, 0)[0]
    roles = {name: part.role for name, part in dissect(WORKLOAD.build, inputs, size=Size(16, 2)).items()}
    ends = {name.rpartition(".")[2] for name in roles}
    assert ends == {"weight", "bias"}
    assert roles.pop("enter.weight") == "input"
    assert roles.pop("readout.weight") == "output"
    assert all(role == ("bias" if name.endswith("bias") else "hidden") for name, role in roles.items())
    wide, narrow = _plan(64).rows, _plan(16).rows
    for name, row in wide.items():
        slower = 4 if name.endswith("weight") and name != "enter.weight" else 1
        assert row.lr == pytest.approx(narrow[name].lr / slower)


def _plan(width: int):
    return plan(WORKLOAD.build, WORKLOAD.batch(0, 0)[0], base=Size(16, 2), size=Size(width, 2), lr=2**-7)


def _run(**options) -> Run:
    return Run("two-cylinders", Size(16, 2), base=Size(16, 2), held_out=1, **options)
