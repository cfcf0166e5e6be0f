import dataclasses
import math
import re
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import theodolite as th
from theodolite.core.calling import OutputLoss
from theodolite.core.size import Size
from theodolite.probes import along_temperature, hessian
from theodolite.surveying import SurveyContext, budget, curvature_setup
from theodolite.surveying.budget import TooLong
from theodolite.surveying.curvature_setup import find_setup
from theodolite.surveying.sections import curvature
from theodolite.surveying.sections.curvature import (
    Edges,
    SpectrumEnds,
    find_edges,
    find_spectrum,
    section,
    step_size,
)
from theodolite.surveying.sections.curvature.zone import ZoneAxis
from theodolite.surveying.short_training import wake
from theodolite.surveying.trials import LR, PlannedRates, planned_rates
from theodolite.workloads import Workload

examine = section.run
LAYERS = 3


def rows(seed, step, num=128):
    """Rows of sixteen numbers; the class is the greatest of the first four."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(num, 16, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


class MLP(nn.Module):
    """Three linear maps, if not told otherwise, and ReLU: the logits of αθ are α³ times as large."""

    def __init__(self, width, depth, init=1.0, multiplier=1.0, norm=nn.Identity, hidden=2):
        super().__init__()
        sizes = [16, *[width] * hidden, 4]
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(sizes))
        self.norms = nn.ModuleList(norm(width) for _ in range(hidden))
        self.multiplier = multiplier
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=init * math.sqrt(2 / layer.in_features))

    def forward(self, x):
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.multiplier * self.layers[-1](x)


def site_of(build, **changes):
    given = {"batch": rows, "loss": F.cross_entropy, "size": Size(64, 2)} | changes
    deep = given.pop("deep", False)
    workload = Workload("mine", build, **given)
    return SurveyContext(workload, workload.size, deep=deep)


def found(site):
    return {finding.code: finding for finding in examine(site)}


@cache
def found_of(**options):
    """Of networks that several tests look at."""
    return found(site_of(partial(MLP, **options)))


def zone(site):
    """The first finding, without waiting for the others."""
    finding = next(iter(examine(site)))
    assert finding.code == "TH301"
    return finding


def place(text, name):
    """The number that a remedy names."""
    return float(text.split(f"{name} = ")[1].split(", ")[0].strip(". ").replace(",", ""))


# Where the start lies


def test_a_usual_start_is_inside_the_zone():
    finding = found_of()["TH301"]
    assert finding.level == "ok"
    assert "inside the Goldilocks zone" in finding.sentence
    assert finding.remedy == ""


@pytest.mark.parametrize("init", [30.0, 1 / 30])
def test_an_initialisation_that_is_off_is_told_by_how_much(init):
    finding = found_of(init=init)["TH301"] if init > 1 else zone(site_of(partial(MLP, init=init)))
    assert finding.level == "warn"
    assert place(finding.remedy, "α") == pytest.approx(1 / init, rel=0.5)
    temperature = place(finding.remedy, "T") if init > 1 else 1 / place(finding.remedy, "T")
    assert math.log10(temperature) == pytest.approx(LAYERS * math.log10(init), abs=0.5)
    assert ("Divide" if init > 1 else "Multiply the logits") in finding.remedy


@pytest.mark.parametrize("multiplier, levels", [(100.0, ("note", "warn")), (1e5, ("warn",))])
def test_logits_that_are_too_large(multiplier, levels):
    finding = zone(site_of(partial(MLP, multiplier=multiplier)))
    assert finding.level in levels
    assert math.log10(place(finding.remedy, "T")) == pytest.approx(math.log10(multiplier), abs=0.5)
    scale = multiplier ** (-1 / LAYERS)
    assert math.log10(place(finding.remedy, "α")) == pytest.approx(math.log10(scale), abs=0.25)


def test_the_remedy_brings_the_start_into_the_zone():
    remedy = found_of(init=30.0)["TH301"].remedy
    mended = partial(MLP, init=30.0 * place(remedy, "α"))
    assert zone(site_of(mended)).level == "ok"
    cooled = partial(MLP, init=30.0, multiplier=1 / place(remedy, "T"))
    assert zone(site_of(cooled)).level == "ok"


def test_the_table_is_the_curvature_at_each_temperature():
    site = site_of(MLP)
    finding = found_of()["TH301"]
    table = [row for row in finding.evidence.rows if row["axis"] == "T"]
    assert len(table) == 13
    again = along_temperature(site.build(), F.cross_entropy, site.batch, [row["at"] for row in table])
    assert [row["excess"] for row in table] == pytest.approx([one.t.value for one in again])
    (figure,) = finding.evidence.figures
    left, right = figure.panels
    assert left.data[1]["y"] == [row["excess"] for row in table]
    assert right.data[1]["x"] == [row["at"] for row in finding.evidence.rows if row["axis"] == "α"]


def test_with_norms_a_start_outside_is_worth_a_note_and_no_remedy():
    normed = partial(MLP, norm=nn.LayerNorm)
    finding = zone(site_of(partial(normed, hidden=3)))
    assert (finding.level, finding.remedy) == ("note", "")
    assert "This is usual with norms" in finding.sentence


@pytest.mark.parametrize("norm, level", [(nn.LayerNorm, "note"), (nn.Identity, "warn")])
def test_a_start_that_is_sure_of_what_is_wrong_is_told_its_loss(norm, level):
    site = site_of(partial(MLP, multiplier=1e5, norm=norm))
    finding = zone(site)
    assert finding.level == level
    loss = float(site.evaluate(site.build()))
    said = re.search(r"The loss starts at ([\d,]+); undecided logits would give 1.39", finding.sentence)
    assert said is not None
    assert float(said[1].replace(",", "")) == pytest.approx(loss, rel=1e-3)
    assert ("smaller by a factor of" in finding.remedy) == (level == "note")


def test_logits_that_are_always_zero_have_no_zone():
    findings = found(site_of(partial(MLP, multiplier=0.0)))
    assert (findings["TH301"].level, findings["TH301"].title) == ("note", "No Goldilocks zone")
    assert "the first step never overshoots" in findings["TH302"].sentence


def test_a_loss_without_a_softmax_has_no_zone():
    def batch(seed, step):
        inputs, _ = rows(seed, step)
        return inputs, inputs[:, :4]

    findings = found(site_of(MLP, batch=batch, loss=F.mse_loss))
    assert list(findings) == ["TH301", "TH302", "TH303"]
    assert findings["TH301"].level == "note"
    assert "not the cross-entropy of a softmax" in findings["TH301"].sentence


def axis(start, start_error, peak):
    """Along three places, of which the first is the start."""
    (template,) = along_temperature(MLP(8, 2), F.cross_entropy, rows(0, 0), [1.0])

    def found_with(value, error):
        estimate = dataclasses.replace(template.hessian.t, value=value, error=error)
        return dataclasses.replace(template, hessian=dataclasses.replace(template.hessian, t=estimate))

    values = [(start, start_error), (peak, 0.1), (0.0, 0.1)]
    return ZoneAxis("T", (1.0, 10.0, 100.0), tuple(found_with(*value) for value in values))


def test_noise_at_the_edge_of_the_zone_is_no_clear_case():
    near, far, inside = axis(0.9, 0.1, 2.0), axis(0.5, 0.1, 2.0), axis(1.1, 0.1, 2.0)
    assert (near.is_inside, near.is_clearly_outside) == (False, False)
    assert (far.is_inside, far.is_clearly_outside) == (False, True)
    assert (inside.is_inside, inside.is_clearly_outside) == (True, False)
    assert inside.zone.low == -math.inf
    assert inside.zone.high == pytest.approx(1.5)
    assert axis(-1.0, 0.1, 0.1).zone is None


# How large a step is safe


class Features(nn.Module):
    """A linear map of fixed features: with a squared loss its Hessian is `2 ΦᵀΦ / N`."""

    def __init__(self, width, depth):
        super().__init__()
        self.register_buffer("features", torch.randn(16, width, generator=torch.Generator().manual_seed(1)))
        self.readout = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.readout.weight)

    def forward(self, x):
        return self.readout(x @ self.features)


@cache
def found_squared(scale):
    return found(squared(scale))


def squared(scale):
    def batch(seed, step):
        inputs, _ = rows(seed, step)
        return scale * inputs, inputs[:, :1]

    return site_of(Features, batch=batch, loss=F.mse_loss)


def test_the_sharpness_of_a_linear_model_is_the_one_in_closed_form():
    site = squared(0.1)
    phi = (site.batch[0] @ site.build().features).double()
    largest = float(torch.linalg.eigvalsh(2 * phi.mT @ phi / len(phi))[-1])
    findings = found_squared(0.1)
    numbers = findings["TH302"].evidence.numbers
    assert numbers["2/λ_max, edge of gradient descent"] == pytest.approx(2 / largest, rel=0.01)
    assert float(numbers["λ_max"].split(" ± ")[0]) == pytest.approx(largest, rel=0.01)
    assert findings["TH303"].level == "ok"
    assert "S is 0 % of the curvature" in findings["TH303"].sentence


def test_adamw_overshoots_from_the_edge_of_its_first_step_on():
    site = squared(0.1)
    edge = found_squared(0.1)["TH302"].evidence.numbers["edge of its first step"]

    def after_a_step(lr):
        model = site.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
        site.workload.evaluate(model, site.batch).backward()
        optimizer.step()
        return float(site.evaluate(model))

    before = float(site.evaluate(site.build()))
    assert after_a_step(0.98 * edge) < before < after_a_step(1.02 * edge)


def test_the_preconditioned_operator_is_the_matrix_that_it_says():
    model = MLP(4, 2).double()
    inputs, targets = rows(0, 0)
    operator = hessian(model, F.cross_entropy, (inputs.double(), targets))
    matrix = operator @ torch.eye(operator.size, dtype=torch.float64)
    diagonal = torch.rand(operator.size, dtype=torch.float64) + 0.1
    measured = curvature.Preconditioned(operator, diagonal)
    dense = measured @ torch.eye(operator.size, dtype=torch.float64)
    assert torch.allclose(dense, dense.mT)
    expected = np.sort(np.linalg.eigvals((matrix / diagonal[:, None]).numpy()).real)
    assert torch.linalg.eigvalsh(dense).numpy() == pytest.approx(expected, abs=1e-10)
    one = torch.randn(operator.size, dtype=torch.float64)
    assert torch.allclose(measured @ one, dense @ one)


@pytest.mark.parametrize("share, grows", [(0.99, False), (1.01, True)])
def test_momentum_diverges_beyond_38_over_the_sharpness(share, grows):
    """Adam with a fixed preconditioner, in the direction of the largest eigenvalue."""
    sharpness, x, momentum = 3.0, 1.0, 0.0
    lr = share * curvature.ADAM_EDGE / sharpness
    for _ in range(2000):
        momentum = 0.9 * momentum + 0.1 * sharpness * x
        x -= lr * momentum
    assert (abs(x) > 1) == grows


def test_adams_own_sharpness_is_that_of_gradients_over_several_batches():
    site = squared(0.1)
    model = site.build()
    gradients = []
    for step in range(curvature.BATCHES):
        (gradient,) = torch.autograd.grad(
            site.workload.evaluate(model, rows_of(site, step)), model.readout.weight
        )
        gradients.append(gradient.flatten())
    diagonal = torch.stack(gradients).square().mean(0).sqrt().double() + curvature.EPS
    phi = (site.batch[0] @ model.features).double()
    matrix = 2 * phi.mT @ phi / len(phi)
    largest = float(torch.linalg.eigvals(matrix / diagonal[:, None]).real.max())
    numbers = found_squared(0.1)["TH302"].evidence.numbers
    assert numbers["AdamW's own sharpness"] == pytest.approx(largest, rel=0.02)
    assert numbers["edge of AdamW"] == pytest.approx(38 / largest, rel=0.02)


class Silent(nn.Module):
    """`C tanh(A x)` with C = 0: A has no gradient at the start, but ∂²L/∂A∂C is not zero."""

    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Linear(16, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.leave = nn.Linear(width, 4, bias=False)
        nn.init.zeros_(self.leave.weight)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x)


def test_where_tensors_have_no_gradient_at_the_start_the_edge_of_later_steps_is_measured_after_some():
    """At the start the preconditioner would be eps there, and the edge far too low."""
    site = site_of(Silent, size=Size(8, 1))
    setup = find_setup(site)
    ends = SpectrumEnds(1.0, -1.0, (0.0, 0.0), converged=True)
    edges = find_edges(setup, ends)
    assert edges.idle == ("enter.weight", "blocks.0.weight")

    def dense(model):
        gradients = []
        for step in range(curvature.BATCHES):
            batch = setup.batch if step == 0 else setup.draw(step)
            found = torch.autograd.grad(site.workload.evaluate(model, batch), list(model.parameters()))
            gradients.append(torch.cat([one.flatten() for one in found]))
        scale = torch.stack(gradients).square().mean(0).sqrt() + curvature.EPS
        operator = hessian(model, site.workload.loss, setup.batch)
        matrix = operator @ torch.eye(operator.size)
        root = scale.double().rsqrt()
        return 38 / float(torch.linalg.eigvalsh(root[:, None] * matrix.double() * root).max())

    start, later = dense(site.build()), dense(wake(site, site.size).model)
    assert edges.settled == pytest.approx(later, rel=0.03)
    assert start < later / 30
    finding = step_size(setup, edges, PlannedRates(LR, LR))
    assert "is that after 8 of them, because at the start 2 tensors have no gradient" in finding.sentence
    assert finding.evidence.numbers["steps of AdamW"] == 8


def test_where_all_tensors_have_a_gradient_nothing_is_trained(monkeypatch):
    monkeypatch.setattr(curvature, "wake", None)
    assert "no gradient" not in found(site_of(MLP, size=Size(16, 2)))["TH302"].sentence


def rows_of(site, step):
    return site.workload.draw(0, step)


def test_a_loss_too_sharp_for_the_learning_rate_is_a_warning():
    finding = found_squared(300.0)["TH302"]
    assert finding.level == "warn"
    assert "is beyond both edges" in finding.sentence
    assert "That holds while the curvature stays as it was measured" in finding.sentence  # not TH703's trial
    assert "warm up" in finding.remedy
    assert found_squared(0.1)["TH302"].level == "ok"


@pytest.mark.parametrize(
    "first, highest, level",
    [(0.5, 0.5, "ok"), (1.5, 1.5, "note"), (0.5, 2.5, "note"), (2.5, 2.5, "warn")],
)
def test_a_warm_up_softens_what_is_beyond_the_edge(first, highest, level):
    at = find_setup(site_of(MLP))
    bounds = Edges(SpectrumEnds(0.1, -0.1, (0.0, 0.0), converged=True), 19.0, first=1.0, converged=True)
    assert bounds.settled == pytest.approx(2.0)
    finding = step_size(at, bounds, PlannedRates(first, highest))
    assert finding.level == level
    assert bool(finding.remedy) == (level != "ok")
    assert ("rising to" in finding.sentence) == (highest > first)


def test_eigenvalues_that_have_not_converged_are_said():
    at = find_setup(site_of(MLP))
    bounds = Edges(SpectrumEnds(1.0, -1.0, (0.5, 0.5), converged=False), 19.0, first=1.0, converged=False)
    assert "may be lower" in step_size(at, bounds, PlannedRates(0.1, 0.1)).sentence


@pytest.mark.parametrize(
    "schedule, first, highest",
    [
        (None, LR, LR),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=100), 0.3 / 25, 0.3),
        (partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 10)), LR / 10, LR),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=50), LR, LR),
        (lr_scheduler.ReduceLROnPlateau, LR, LR),
        (lambda optimizer: 1 / 0, LR, LR),
    ],
)
def test_planned_rates_are_those_of_the_schedule(schedule, first, highest):
    rates = planned_rates(site_of(MLP, schedule=schedule))
    assert (rates.first, rates.highest) == (pytest.approx(first), pytest.approx(highest, rel=1e-3))


def test_the_farther_of_two_ends_is_the_right_one(monkeypatch):
    at = find_setup(site_of(MLP))
    right, _ = find_spectrum(at)
    eigenvalues = curvature.eigenvalues

    def short(*args, **options):
        once = eigenvalues(*args, **options)
        return dataclasses.replace(once, values=0.5 * once.values)

    monkeypatch.setattr(curvature, "eigenvalues", short)
    ends, _ = find_spectrum(at)
    assert (ends.largest, ends.smallest) == pytest.approx((right.largest, right.smallest), rel=0.02)


# What the curvature is made of


def test_the_shares_are_those_of_explicit_matrices():
    site = site_of(partial(MLP, multiplier=3.0), size=Size(16, 2))
    finding = found(site)["TH303"]
    operator = hessian(site.build(), F.cross_entropy, site.batch)
    identity = torch.eye(operator.size)
    gauss_newton, residual = operator.gauss_newton @ identity, operator.residual @ identity
    for name, matrix in (("‖G‖", gauss_newton), ("‖S‖", residual)):
        assert float(finding.evidence.numbers[name].split(" (")[0]) == pytest.approx(
            float(matrix.norm()), rel=0.15
        )
    values = torch.linalg.eigvalsh((gauss_newton + residual).double())
    ratio = abs(float(values[0] / values[-1]))
    assert finding.evidence.numbers["|λ_min/λ_max|"] == pytest.approx(ratio, rel=0.02)
    assert finding.level == ("note" if residual.norm() > 2 * gauss_newton.norm() else "ok")
    (figure,) = finding.evidence.figures
    (panel,) = figure.panels
    places, heights = torch.tensor(panel.data[0]["x"]), torch.tensor(panel.data[0]["y"])
    peak = places[heights.argmax()]
    assert abs(peak) < 0.05 * values[-1]  # most eigenvalues are near zero


def test_a_saturated_softmax_leaves_nothing_to_gauss_newton():
    finding = found_of(init=30.0)["TH303"]
    assert finding.level == "note"
    assert "S is 100 %" in finding.sentence
    assert "Gauss–Newton" in finding.why


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, labels: scores.mean(),
        lambda scores, labels: (1 - scores * (2 * labels[:, None] - 3)).relu().mean(),
    ],
)
def test_a_loss_that_is_linear_in_the_output_is_not_blamed_on_the_network(loss):
    finding = found(site_of(MLP, loss=loss, size=Size(16, 2)))["TH303"]
    assert finding.level == "ok"
    assert "G is zero by definition" in finding.sentence
    assert not finding.remedy


def test_a_loss_of_the_whole_output_has_no_two_parts():
    finding = found(site_of(MLP, loss=OutputLoss(F.cross_entropy), size=Size(16, 2)))["TH303"]
    assert finding.level == "ok"
    assert "cannot be split" in finding.sentence
    assert "‖G‖" not in finding.evidence.numbers


def test_a_saturated_sigmoid_is_not_called_linear():
    def loss(scores, labels):
        return F.binary_cross_entropy_with_logits(scores, (labels[:, None] > 1).float().expand_as(scores))

    finding = found(site_of(partial(MLP, multiplier=1e9), loss=loss, size=Size(16, 2)))["TH303"]
    assert finding.level == "note"
    assert "by definition" not in finding.sentence


# On what it is measured


def test_a_large_network_is_measured_at_the_base_of_the_trials():
    site = site_of(MLP, size=Size(4096, 2))
    assert find_setup(site).size == Size(64, 2)
    finding = zone(site)
    assert "At 64 × 2, a smaller network of the trials, " in finding.sentence
    assert finding.evidence.numbers["size"] == "64 × 2"


def test_a_batch_is_cut_to_what_is_needed_and_affordable(monkeypatch):
    many = site_of(MLP, batch=partial(rows, num=1000))
    assert find_setup(many).targets == 128
    assert find_setup(dataclasses.replace(many, deep=True)).targets == 512
    work = 5e3 * 128  # of 5,376 weights: fewer examples, but more than a few
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, work=work))
    assert 64 < find_setup(many).targets < 128
    assert find_setup(many).draw(1)[0].shape[0] == find_setup(many).targets


def test_what_is_too_large_at_any_size_is_a_note(monkeypatch):
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, work=1.0))
    monkeypatch.setattr(curvature_setup, "ROUGH", dataclasses.replace(curvature_setup.ROUGH, work=1.0))
    (finding,) = examine(site_of(MLP))
    assert (finding.code, finding.level) == ("TH301", "note")
    assert "which is too much" in finding.sentence
    assert "TH302 and TH303 are missing too" in finding.sentence
    assert "--deep" in finding.remedy


def test_it_stops_when_its_work_is_spent(monkeypatch):
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, most=0.0))
    (finding,) = examine(site_of(MLP))
    assert (finding.code, finding.level) == ("TH301", "note")
    assert "it would take more than 0 multiplications, at 64 × 2" in finding.sentence


def test_work_can_be_spent_between_findings(monkeypatch):
    """Enough for the zone, not for the spectrum."""
    here = find_setup(site_of(MLP))
    products = here.directions * (1 + len(curvature_setup.QUICK.decades) + len(curvature_setup.QUICK.near))
    most = curvature_setup.PRODUCT * products * here.work.total
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, most=most))
    first, second = examine(site_of(MLP))
    assert (first.code, second.code) == ("TH301", "TH302")
    assert "multiplications" in second.sentence
    assert "TH303 is missing too" in second.sentence


def test_the_clock_is_a_last_resort_and_says_so(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(budget, "clock", lambda: now[0])
    found = []
    for finding in examine(site_of(MLP)):
        found.append(finding)
        now[0] = budget.LAST_RESORT + 5
    assert [finding.code for finding in found] == ["TH301", "TH302"]
    assert "it was stopped after 1805 s" in found[1].sentence


class Gated(MLP):
    """An operation without a rule: directions are multiplied one by one."""

    def forward(self, x):
        return super().forward(x) + 0 * torch.special.i0e(self.layers[0].weight).sum()


def test_what_a_sweep_cannot_take_is_measured_in_fewer_directions():
    site = site_of(Gated)
    finding = zone(site)
    assert finding.evidence.numbers["directions"] == curvature_setup.ROUGH.directions
    assert finding.level == "ok"


def test_where_each_direction_takes_a_product_fewer_examples_are_measured_and_told(monkeypatch):
    whole = find_setup(site_of(Gated))
    most = whole.planned / 2
    monkeypatch.setattr(curvature_setup, "ROUGH", dataclasses.replace(curvature_setup.ROUGH, most=most))
    here = find_setup(site_of(Gated))
    assert curvature_setup.FEWEST_EXAMPLES <= here.targets <= whole.targets / 2
    assert here.setting["targets in the batch"] == f"{here.targets} of {whole.targets}"
    monkeypatch.setattr(curvature_setup, "FEWEST_EXAMPLES", whole.targets)
    here = find_setup(site_of(Gated))
    assert (here.targets, here.effort.eigenvalues) == (whole.targets, curvature_setup.FEWEST_PRODUCTS)
    monkeypatch.setattr(curvature_setup, "ROUGH", dataclasses.replace(curvature_setup.ROUGH, most=most / 1e6))
    with pytest.raises(TooLong, match=r"at 64 × 2 take \S+ times the work .* loss of \d+ examples takes"):
        find_setup(site_of(Gated))


def test_what_is_too_large_is_named(monkeypatch):
    """The network, its loss or its logits."""
    rough = curvature_setup.ROUGH
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, work=1.0))
    monkeypatch.setattr(curvature_setup, "ROUGH", dataclasses.replace(rough, work=1.0))
    with pytest.raises(TooLong, match=r"at 64 × 2 the loss of \d+ examples takes [\d,]+ operations with"):
        find_setup(site_of(MLP))
    monkeypatch.setattr(curvature_setup, "ROUGH", dataclasses.replace(rough, logits=1))
    with pytest.raises(TooLong, match=r"at 64 × 2 the logits of \d+ examples have \d+ entries"):
        find_setup(site_of(MLP))
    monkeypatch.setattr(curvature_setup, "MOST_PARAMETERS", 100)
    with pytest.raises(TooLong, match=r"networks of 64 × 2 are too large, with [\d,]+ parameters"):
        find_setup(site_of(MLP))


def test_a_rough_look_is_cut_to_its_work_also_where_all_directions_go_at_once(monkeypatch):
    monkeypatch.setattr(curvature_setup, "QUICK", dataclasses.replace(curvature_setup.QUICK, work=1.0))
    whole = find_setup(site_of(MLP))
    assert whole.effort == curvature_setup.ROUGH
    monkeypatch.setattr(
        curvature_setup, "ROUGH", dataclasses.replace(curvature_setup.ROUGH, most=whole.planned / 2)
    )
    here = find_setup(site_of(MLP))
    assert here.targets < whole.targets
    here.spend(here.effort.products)  # which is not refused


class Bags(MLP):
    """`embedding_bag`, which torch differentiates once."""

    def forward(self, x):
        return F.embedding_bag(torch.arange(len(x))[:, None], super().forward(x))


def test_a_network_without_a_second_derivative_is_a_note():
    (finding,) = examine(site_of(Bags))
    assert (finding.code, finding.level) == ("TH301", "note")
    assert "_embedding_bag_backward" in finding.sentence
    assert "skip the section" in finding.remedy


def test_memory_that_is_not_there_is_a_note(monkeypatch):
    def explore(setup):
        raise RuntimeError("can't allocate memory: you tried to allocate 1 byte")

    monkeypatch.setattr(curvature, "explore", explore)
    (finding,) = examine(site_of(MLP))
    assert (finding.code, finding.level) == ("TH301", "note")
    assert "could not be measured: RuntimeError: can't allocate memory" in finding.sentence


class Idle(MLP):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.idle = nn.Linear(width, width)


def test_parameters_that_do_nothing_are_left_out():
    with_idle, without = found(site_of(Idle)), found_of()
    assert with_idle["TH301"].evidence.numbers["parameters"] == 64 * (16 + 64 + 4)
    assert with_idle["TH303"].level == without["TH303"].level


def test_a_network_in_halves_is_measured_in_full():
    def build(width, depth):
        return MLP(width, depth).bfloat16()

    def batch(seed, step):
        inputs, targets = rows(seed, step)
        return inputs.bfloat16(), targets

    halves = zone(site_of(build, batch=batch))
    excess = [float(one.evidence.rows[6]["excess"]) for one in (halves, found_of()["TH301"])]
    assert excess[0] == pytest.approx(excess[1], rel=0.05)


def test_the_same_survey_says_the_same_twice_and_saves(tmp_path):
    once, again = th.survey(site_of(MLP).workload, only=["curvature"]), found_of().values()
    assert [one.to_dict() for one in again] == [
        dataclasses.replace(one, section="").to_dict() for one in once.findings
    ]
    assert "Excess of positive curvature" in once.save(tmp_path / "survey.html").read_text()


def test_the_built_in_gpt_is_measured_small():
    workload = th.workload("gpt-sotu")
    at = find_setup(SurveyContext(workload, workload.size))
    assert (at.size, at.targets) == (Size(64, 2), 128)


def test_data_that_end_too_soon_are_a_note():
    def batch(seed, step):
        if step == 2:
            raise IndexError("no more rows")
        return rows(seed, step)

    finding = list(examine(site_of(MLP, batch=batch)))[1]
    assert (finding.code, finding.level) == ("TH302", "note")
    assert "batch(0, 2) failed: IndexError: no more rows" in finding.sentence
