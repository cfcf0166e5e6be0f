"""A controller of step lengths: r is at most the limit, and where it does not act it might not be there."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import theodolite as th
from theodolite.controllers.safe_step import SafeStep
from theodolite.probes import radius

cross_entropy = nn.functional.cross_entropy


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :5].argmax(1)


def gradients(model: nn.Module, pair: tuple[Tensor, Tensor]) -> None:
    model.zero_grad()
    cross_entropy(model(pair[0]), pair[1]).backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("limit", [1.0, 0.25])
def test_no_step_is_longer_than_the_limit_under_spikes_of_the_learning_rate(name: str, limit: float) -> None:
    model = network()
    inside = OPTIMIZERS[name](model.parameters())
    safe = SafeStep(inside, model, cross_entropy, limit=limit)
    usual = inside.param_groups[0]["lr"]
    largest, acted = 0.0, 0
    for step in range(25):
        inside.param_groups[0]["lr"] = usual * 10 ** (step % 5)  # ×1 to ×10⁴
        gradients(model, batch(step))
        before = copy.deepcopy(model)
        safe.step(batch(step))
        made = {key: tensor - dict(before.named_parameters())[key] for key, tensor in weights(model).items()}
        r = radius(before, cross_entropy, batch(step), made).r  # measured from outside
        assert r <= limit * (1 + 1e-9)
        largest = max(largest, r)
        acted += r > limit * (1 - 1e-9)
    assert safe.report.acted == acted > 5
    assert safe.report.steps == safe.report.measured == 25
    assert safe.report.largest_after == pytest.approx(largest) == pytest.approx(limit)
    assert safe.report.largest_before > 100
    assert safe.report.share == acted / 25


def test_a_shorter_step_is_a_part_of_the_optimizers_own_decay_included() -> None:
    model, plain = network(), network()
    pair = batch(0)
    safe = SafeStep(torch.optim.AdamW(model.parameters(), lr=9.0, weight_decay=0.5), model, cross_entropy)
    other = torch.optim.AdamW(plain.parameters(), lr=9.0, weight_decay=0.5)
    start = weights(model)
    for one in (model, plain):
        gradients(one, pair)
    safe.step(pair)
    other.step()
    whole = {name: tensor - start[name] for name, tensor in weights(plain).items()}
    found = radius(network(), cross_entropy, pair, whole)
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor - start[name], whole[name] / found.r)
    for mine, its in zip(safe.state.values(), other.state.values(), strict=True):
        assert mine["step"] == its["step"] == 1
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_nothing_is_capped_it_is_the_plain_optimizer_bit_by_bit(name: str) -> None:
    runs = []
    for wrapped in (True, False):
        model = network(torch.float32)
        optimizer: Any = OPTIMIZERS[name](model.parameters())
        safe = SafeStep(optimizer, model, cross_entropy, limit=1e6) if wrapped else None
        schedule = LambdaLR(safe or optimizer, lambda step: 1 / (1 + step))
        for step in range(6):
            pair = batch(step, torch.float32)
            gradients(model, pair)
            if safe is None:
                optimizer.step()
            else:
                safe.step(pair)
            schedule.step()
        runs.append((weights(model), optimizer.param_groups[0]["lr"]))
    assert safe is None
    assert runs[0][1] == runs[1][1] < 0.05
    for key, tensor in runs[0][0].items():
        assert torch.equal(tensor, runs[1][0][key])


@pytest.mark.parametrize("every", [1, 4])
def test_it_resumes_bit_by_bit(every: int) -> None:
    def fresh() -> tuple[nn.Module, SafeStep, Any]:
        model = network(torch.float32)
        inside = torch.optim.AdamW(model.parameters(), lr=1e-3)
        safe = SafeStep(inside, model, cross_entropy, every=every)
        return model, safe, CosineAnnealingLR(safe, 20)

    def train(model: nn.Module, safe: SafeStep, schedule: Any, steps: range) -> None:
        for step in steps:
            pair = batch(step, torch.float32)
            gradients(model, pair)
            usual = safe.param_groups[0]["lr"]
            safe.param_groups[0]["lr"] = usual * (1e4 if step == 3 else 1.0)
            safe.step(pair)
            safe.param_groups[0]["lr"] = usual
            schedule.step()

    whole = fresh()
    train(*whole, range(11))
    first = fresh()
    train(*first, range(6))
    saved = copy.deepcopy([part.state_dict() for part in first])
    again = fresh()
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    train(*again, range(6, 11))
    assert whole[1].report == again[1].report
    assert whole[1].report.acted > 0
    for name, tensor in weights(whole[0]).items():
        assert torch.equal(tensor, weights(again[0])[name])
    plain = torch.optim.AdamW(first[0].parameters())
    plain.load_state_dict(first[1].state_dict())  # what it saves an optimizer can read, and the other way
    again[1].load_state_dict(plain.state_dict())
    assert again[1].report.steps == 0


def test_every_so_many_steps_it_measures_and_whenever_a_step_looks_too_long() -> None:
    model = network()
    inside = torch.optim.SGD(model.parameters(), lr=1e-3)
    safe = SafeStep(inside, model, cross_entropy, every=5)
    measured = []
    for step in range(12):
        inside.param_groups[0]["lr"] = 1e4 if step == 7 else 1e-3
        gradients(model, batch(step))
        before, count = copy.deepcopy(model), safe.report.measured
        safe.step(batch(step))
        measured.append(safe.report.measured - count)
        if step == 7:
            made = {key: one - dict(before.named_parameters())[key] for key, one in weights(model).items()}
            assert radius(before, cross_entropy, batch(step), made).r == pytest.approx(1)
    assert measured == [1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0]
    assert safe.report.acted == 1


def test_of_accumulated_batches_the_worst_row_of_all_counts() -> None:
    model = network()
    pairs = [batch(0), batch(1), batch(2)]
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=1e3), model, cross_entropy)
    model.zero_grad()
    for pair in pairs:
        (cross_entropy(model(pair[0]), pair[1]) / 3).backward()
    before = copy.deepcopy(model)
    safe.step(pairs)
    made = {key: one - dict(before.named_parameters())[key] for key, one in weights(model).items()}
    each = [radius(before, cross_entropy, pair, made).r for pair in pairs]
    assert max(each) == pytest.approx(1)
    assert min(each) < 1


def test_with_a_gradient_scaler_steps_are_those_of_unscaled_gradients() -> None:
    runs = []
    for scaled in (True, False):
        model = network(torch.float32)
        safe = SafeStep(torch.optim.SGD(model.parameters(), lr=50.0), model, cross_entropy)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            pair = batch(step, torch.float32)
            safe.zero_grad()
            value = cross_entropy(model(pair[0]), pair[1]) * (math.inf if step == 2 else 1.0)
            scaler.scale(value).backward()
            if scaled or step != 2:  # the scaler leaves out what is not finite
                scaler.step(safe, pair)
            scaler.update()
        runs.append((weights(model), safe.report))
    assert runs[0][1].steps == runs[1][1].steps == 3
    assert runs[0][1].acted == runs[1][1].acted > 0
    for key, tensor in runs[0][0].items():
        torch.testing.assert_close(tensor, runs[1][0][key], rtol=1e-4, atol=1e-5)


def test_of_an_lbfgs_with_a_closure() -> None:
    model = network()
    pair = batch(0)
    inside = torch.optim.LBFGS(model.parameters(), lr=50.0, max_iter=2)
    safe = SafeStep(inside, model, cross_entropy)

    def closure() -> Tensor:
        safe.zero_grad()
        value = cross_entropy(model(pair[0]), pair[1])
        value.backward()
        return value

    before = copy.deepcopy(model)
    value = safe.step(pair, closure=closure)
    assert float(value.detach()) == pytest.approx(float(cross_entropy(before(pair[0]), pair[1]).detach()))
    made = {key: one - dict(before.named_parameters())[key] for key, one in weights(model).items()}
    assert radius(before, cross_entropy, pair, made).r == pytest.approx(1)
    gradients(model, pair)
    with pytest.raises(th.UseError, match="LBFGS computes its gradients itself"):
        safe.step(pair)


def everything(model: nn.Module, safe: SafeStep) -> list[Any]:
    moments = [value.clone() for state in safe.state.values() for value in state.values()]
    return [weights(model), moments, safe.report]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("closed", [False, True])
def test_gradients_that_are_not_finite_are_refused_and_nothing_is_changed(bad: float, closed: bool) -> None:
    model = network()
    safe = SafeStep(torch.optim.AdamW(model.parameters(), lr=0.01), model, cross_entropy)
    gradients(model, batch(0))
    safe.step(batch(0))
    kept = copy.deepcopy(everything(model, safe))

    def closure() -> Tensor:
        gradients(model, batch(1))
        model[3].bias.grad[2] = bad  # type: ignore[union-attr, index]
        return torch.zeros(())

    if not closed:
        closure()
    with pytest.raises(th.UseError, match=r"not finite in 3\.bias|of 3\.bias is (nan|inf) in 1 of 5"):
        safe.step(batch(1), closure=closure if closed else None)
    assert kept[2] == safe.report
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, kept[0][name])
    for now, then in zip(everything(model, safe)[1], kept[1], strict=True):
        assert torch.equal(now, then)


def test_other_bad_input_is_refused_before_a_step() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, said in (({"limit": 0.0}, "limit is 0.0"), ({"every": 0}, "every is 0")):
        with pytest.raises(th.UseError, match=said):
            SafeStep(sgd, model, cross_entropy, **options)  # type: ignore[arg-type]
    with pytest.raises(th.UseError, match="none of the model's"):
        SafeStep(sgd, nn.Linear(2, 2), cross_entropy)
    with pytest.raises(th.UseError, match=r"not a torch\.optim\.Optimizer"):
        SafeStep(model, model, cross_entropy)  # type: ignore[arg-type]
    before = weights(model)
    gradients(model, batch(0))
    squares = SafeStep(sgd, model, nn.functional.mse_loss)
    with pytest.raises(th.UseError, match="mse_loss is not a cross-entropy"):
        squares.step((batch(0)[0], torch.zeros(24, 5).double()))
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, before[name])


def test_ignored_targets_and_parameters_that_are_not_trained_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)).double()
    model[0].requires_grad_(False)
    inputs, targets = batch(0)
    inputs[0] *= 1e3
    targets[0] = -100
    safe = SafeStep(torch.optim.SGD(model[1].parameters(), lr=1e3), model, cross_entropy)
    gradients(model, (inputs, targets))
    before = copy.deepcopy(model)
    safe.step((inputs, targets))
    made = {key: weights(model)[key] - dict(before.named_parameters())[key] for key in ("1.weight", "1.bias")}
    assert radius(before, cross_entropy, (inputs[1:], targets[1:]), made).r == pytest.approx(1)
    assert radius(before, cross_entropy, (inputs, targets.clamp(min=0)), made).r > 10
