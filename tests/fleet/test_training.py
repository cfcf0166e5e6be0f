"""The loop that every engine has to agree with."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from theodolite import Size, UseError, Workload
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.plans import planned
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.training import train
from theodolite.optimizers import OPTIMIZERS

MODULUS = 997


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for layer in self.hidden:
            x = x + layer(x.relu())
        return self.last(x)


def rows(seed, step):
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(MODULUS * seed + step))
    return inputs, (inputs.sum(1) > 0).long()


def other_rows(seed, step):
    inputs, targets = rows(seed + 50, step)
    return 3 * inputs, targets


mine = Workload("mine", Net, rows, nn.functional.cross_entropy)
RUN = Run("mine", Size(16, 2), lr=2**-7, base=Size(8, 1), steps=8, held_out=3)


def changed(**fields):
    return dataclasses.replace(RUN, **fields)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer):
    if OPTIMIZERS[optimizer].source == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer")
    lr = {"sgd": 2**-3, "sophia": 2**-5}.get(optimizer, 2**-6)
    schedule = "constant" if OPTIMIZERS[optimizer].averages else "linear"
    outcome = train(changed(optimizer=optimizer, lr=lr, steps=30, every=29, schedule=schedule), mine)
    (_, first), (_, last) = outcome.metrics["loss"]
    assert outcome.status == "finished"
    assert last < first


def test_a_run_is_the_plain_loop():
    plan = planned(RUN, mine)
    model, losses = plan.build(0), []
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer, "linear", steps=8)
    for step in range(8):
        inputs, targets = rows(0, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    held_out = [nn.functional.cross_entropy(model(x), y).item() for x, y in _held_out()]
    outcome = train(RUN, mine)
    assert [value for _, value in outcome.metrics["loss"]] == losses
    assert outcome.held_out == pytest.approx(sum(held_out) / 3, rel=1e-6)
    assert (outcome.step, outcome.readings["tokens"]) == (8, 8 * 16)


def _held_out():
    for step in range(3):
        yield mine.draw_held_out(step)


def test_held_out_batches_are_the_workloads_own_where_it_has_them():
    plain, own = train(RUN, mine), train(RUN, Workload("mine", Net, rows, mine.loss, held_out=other_rows))
    assert plain.metrics == own.metrics
    assert plain.held_out != own.held_out


def test_a_temperature_divides_the_logits():
    model = planned(RUN, mine).build(0)
    inputs, targets = rows(0, 0)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(inputs) / 4.0, targets).item()
    outcome = train(changed(temperature=4.0), mine)
    assert outcome.metrics["loss"][0] == (0, pytest.approx(expected, rel=1e-6))


class Various(Net):
    """Weights and biases that are drawn, biases that start at a constant, and a norm."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        nn.init.uniform_(self.first.bias, -0.1, 0.1)
        for layer in self.hidden:
            nn.init.constant_(layer.bias, 0.25)
        nn.init.normal_(self.last.bias, std=0.3)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.last(self.norm(self.hidden[0](self.first(x))))


def test_an_init_scale_is_a_factor_on_all_that_starts_at_random():
    various = Workload("mine", Various, rows, nn.functional.cross_entropy)
    run = changed(size=Size(16, 1), base=Size(8, 1))
    plain = dict(planned(run, various).build(0).named_parameters())
    scaled = dict(planned(dataclasses.replace(run, init_scale=0.5), various).build(0).named_parameters())
    for name, tensor in plain.items():
        stays = name.startswith("norm") or name == "hidden.0.bias"
        torch.testing.assert_close(scaled[name], tensor if stays else 0.5 * tensor)
    assert plain["first.bias"].std() > 0.01
    assert plain["hidden.0.bias"].tolist() == [0.25] * 16


def test_probes_are_recorded():
    outcome = train(changed(probes=("gradient", "sizes"), every=3), mine)
    assert [step for step, _ in outcome.metrics["gradient"]] == [0, 3, 6, 7]
    model = planned(RUN, mine).build(0)
    inputs, targets = rows(0, 0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    norm = math.sqrt(sum(float(tensor.grad.double().square().sum()) for tensor in model.parameters()))
    assert outcome.metrics["gradient"][0][1] == pytest.approx(norm, rel=1e-6)
    assert outcome.readings["sizes"]["logits"] > 0


def test_accuracy_is_of_the_held_out_batches_and_of_the_last_one_trained_on():
    run = changed(probes=("accuracy",), temperature=100.0)
    plan = planned(run, mine)
    model = plan.build(0)
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer, "linear", steps=8)
    for step in range(8):
        inputs, targets = rows(0, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs) / 100.0, targets).backward()
        optimizer.step()
        schedule.step()

    def right(inputs, targets):
        return (
            sum(int(row[1] > row[0]) == int(label) for row, label in zip(model(inputs), targets, strict=True))
            / 16
        )

    readings = train(run, mine).readings
    assert readings["accuracy"] == pytest.approx(sum(right(*batch) for batch in _held_out()) / 3)
    assert readings["train accuracy"] == right(*rows(0, 7))
    assert readings["accuracy"] != readings["train accuracy"]


def with_gaps(seed, step):
    inputs, targets = rows(seed, step)
    inputs[0, 0] = math.nan
    return inputs, targets


class Filling(Net):
    """Takes nan for a missing value."""

    def forward(self, x):
        return super().forward(x.nan_to_num())


def test_data_that_are_not_finite_are_no_divergence():
    def late(seed, step):
        return with_gaps(seed, step) if step == 5 else rows(seed, step)

    with pytest.raises(UseError, match=r"'late': batch\(0, 5\) has inputs that are not finite.* is nan"):
        train(RUN, Workload("late", Net, late, nn.functional.cross_entropy))
    held_out = Workload("held", Net, rows, nn.functional.cross_entropy, held_out=with_gaps)
    with pytest.raises(UseError, match="'held': held-out batch 0 has inputs that are not finite"):
        train(RUN, held_out)


def test_a_network_that_takes_nan_diverges_by_its_learning_rate():
    filled = Workload("filled", Filling, with_gaps, nn.functional.cross_entropy)
    assert train(RUN, filled).status == "finished"
    assert train(changed(lr=1e30, optimizer="sgd"), filled).status == "diverged"


def test_what_has_diverged_has_no_accuracy():
    outcome = train(changed(probes=("accuracy",), optimizer="sgd", lr=1e30), mine)
    assert outcome.status == "diverged"
    assert not {"accuracy", "train accuracy"} & outcome.readings.keys()


def test_accuracy_is_for_classes_alone():
    real = Workload(
        "mine", Net, lambda seed, step: (rows(seed, step)[0], torch.zeros(16, 2)), nn.functional.mse_loss
    )
    with pytest.raises(ValueError, match=r"targets are a tensor of shape \(16, 2\): leave out the probe"):
        train(changed(probes=("accuracy",)), real)


def test_a_run_leaves_no_trace():
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(RUN, mine)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_the_identity_is_of_the_value_and_of_nothing_else():
    again = Run.from_dict(RUN.to_dict())
    assert again == RUN
    assert again.identity == RUN.identity
    fields = {"seed": 1, "lr": 0.5, "steps": 9, "options": {"betas": (0.9, 0.95)}, "temperature": 2.0}
    others = {changed(**{name: value}).identity for name, value in fields.items()}
    assert len(others | {RUN.identity}) == 6
    assert changed(options={"betas": [0.9, 0.95]}).identity == changed(options=fields["options"]).identity


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"lr": 0.0}, "lr is 0.0: give a positive finite number"),
        ({"lr": math.nan}, "lr is nan"),
        ({"optimizer": "adam"}, "Did you mean 'adamw'"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"base": None}, "a plan starts from a base size"),
        ({"parameterization": "standard"}, "the standard parameterization has none"),
        ({"warmup": 8}, "warmup is 8"),
        ({"final": 2.0}, "final is 2.0: give a finite number from 0 to 1"),
        ({"probes": ("hessian",)}, "probe is 'hessian'"),
        ({"precision": "half"}, "precision is 'half'"),
        ({"vector_lr": 0.1}, "vector_lr is for what a matrix optimizer leaves"),
    ],
)
def test_a_run_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        changed(**fields)


@pytest.mark.parametrize(
    "axes, fixed, said",
    [
        ({"lr": [0.1]}, {}, "no axis 'seed'"),
        ({"lr": [], "seed": [0]}, {}, "axis lr is empty"),
        ({"learning_rate": [0.1], "seed": [0]}, {}, "'learning_rate' is no field of a run"),
        ({"lr": [0.1], "seed": [0]}, {"lr": 0.1}, "lr is an axis of the grid and fixed"),
        ({"lr": 0.1, "seed": [0]}, {}, "axis lr is 0.1: give a list"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(axes, fixed, said):
    with pytest.raises(ValueError, match=said):
        Grid(axes, fixed)


def test_masks_beside_the_targets_are_no_targets():
    def masked(seed, step):
        inputs, labels = rows(seed, step)
        return inputs, (labels, torch.ones(16))

    loss = lambda logits, targets: nn.functional.cross_entropy(logits, targets[0])  # noqa: E731
    outcome = train(RUN, Workload("mine", Net, masked, loss))
    assert outcome.readings["tokens"] == 8 * 16


def test_an_exception_is_recorded_and_the_rest_goes_on():
    def failing(seed, step):
        if seed == 1 and step == 2:
            raise OSError("the disk is gone")
        return rows(seed, step)

    resources = Resources(workloads={"mine": Workload("mine", Net, failing, mine.loss)})
    fixed = {"workload": "mine", "size": RUN.size, "base": RUN.base, "lr": 0.01, "steps": 4, "held_out": 1}
    outcomes = list(serial(Grid({"seed": [0, 1, 2]}, fixed).runs, resources))
    assert [outcome.status for outcome in outcomes] == ["finished", "failed", "finished"]
    assert "OSError: the disk is gone" in outcomes[1].error
    assert "in failing" in outcomes[1].error
