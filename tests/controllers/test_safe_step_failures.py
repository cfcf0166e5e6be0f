"""After any error in a controlled step all is as before it; what cannot be held to a limit is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.controllers.safe_step import SafeStep
from theodolite.optimizers.planned import Planned
from theodolite.probes import optimizer_step, radius

cross_entropy = nn.functional.cross_entropy
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Fragile(nn.Module):
    """Fails in a forward pass, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(4, 3), False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("out of memory, as said")
        return self.layer(inputs)


class Stumbling(torch.optim.Adam):
    """Its own step fails when it is done."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise RuntimeError("as said")


def kept(model: nn.Module, safe: SafeStep) -> list[Any]:
    moments = [value.clone() for state in safe.state.values() for value in state.values()]
    grads = [tensor.grad.clone() for tensor in model.parameters() if tensor.grad is not None]
    return [*(tensor.detach().clone() for tensor in model.parameters()), *moments, *grads, safe.report]


def memory(model: nn.Module, safe: SafeStep) -> None:
    model.fails = True  # type: ignore[assignment]


def infinite_rate(model: nn.Module, safe: SafeStep) -> None:
    safe.param_groups[0]["lr"] = math.inf


def own_step(model: nn.Module, safe: SafeStep) -> None:
    safe.optimizer.fails = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("happens", "said"),
    [(memory, "out of memory"), (infinite_rate, "step of Stumbling is not finite"), (own_step, "as said")],
)
def test_after_an_error_weights_and_state_are_as_before(happens: Any, said: str) -> None:
    model = Fragile()
    safe = SafeStep(Stumbling(model.parameters(), lr=1e-3), model, cross_entropy)
    for _ in range(2):
        safe.zero_grad()
        cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        if not safe.report.steps:
            safe.step(BATCH)
    before = kept(model, safe)
    happens(model, safe)
    with pytest.raises((RuntimeError, th.UseError), match=said):
        safe.step(BATCH)
    for now, then in zip(kept(model, safe), before, strict=True):
        assert torch.equal(now, then) if isinstance(then, Tensor) else now == then


def test_optimizers_with_other_weights_for_evaluation_are_refused() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    model = nn.Linear(4, 3)
    with pytest.raises(th.UseError, match="ScheduleFreeSGD keeps weights for evaluation"):
        SafeStep(source.ScheduleFreeSGD(model.parameters(), lr=0.1), model, cross_entropy)

    def planned(rule: str, make: Any) -> Planned:
        group = {"params": [*model.parameters()], "param_names": ["w", "b"], "rule": rule}
        return Planned([{**group, "lr": 0.1, "planned_lr": 0.1}], {rule: make})

    with pytest.raises(th.UseError, match="schedule-free keeps weights for evaluation"):
        SafeStep(planned("schedule-free", source.ScheduleFreeAdamW), model, cross_entropy)
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    safe = SafeStep(planned("adamw", torch.optim.AdamW), model, cross_entropy)
    safe.step(BATCH)
    assert safe.report.measured == 1


def test_weights_of_several_dtypes_are_refused_with_advice_that_can_be_followed() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.high(self.low(inputs.bfloat16()).float())

    model = Mixed()
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=0.1), model, cross_entropy)
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    with pytest.raises(
        th.UseError, match=r"low\.weight is torch\.bfloat16.*high\.weight.*autocast"
    ) as raised:
        safe.step(BATCH)
    assert "parameters=" not in str(raised.value)


def test_who_needs_a_plain_optimizer_says_so_of_a_controller() -> None:
    model = nn.Linear(4, 3)
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=0.1), model, cross_entropy)
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    for asked in (
        lambda: optimizer_step(safe, model),
        lambda: radius(model, cross_entropy, BATCH, safe),
        lambda: SafeStep(safe, model, cross_entropy).step(BATCH),
    ):
        with pytest.raises(th.UseError, match=r"step of SafeStep needs batch.*that it was made of"):
            asked()
    assert safe.report.steps == 0


def test_a_step_without_its_batch_says_how_to_give_it() -> None:
    model = nn.Linear(4, 3)
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=0.1), model, cross_entropy)
    torch.optim.lr_scheduler.ConstantLR(safe)  # it puts a counter around the step
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(cross_entropy(model(BATCH[0]), BATCH[1])).backward()
    before = copy.deepcopy(model.state_dict())
    for asked in (safe.step, lambda: safe.step(closure=lambda: 0.0), lambda: scaler.step(safe)):
        with pytest.raises(th.UseError, match=r"no batch.*safe\.step\(\(inp.*scaler\.step\(safe, \(inp"):
            asked()  # type: ignore[call-arg, operator]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for given, named in (((BATCH,), {}), ((), {"batch": BATCH})):
        copy.deepcopy(safe).step(*given, **named)
    scaler.step(safe, BATCH)
    assert safe.report.steps == 1
    assert repr(safe) == "SafeStep(SGD, limit=1, every=1)"


def test_groups_added_to_the_optimizer_inside_are_held_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    batch = BATCH[0].double(), BATCH[1]
    inside = torch.optim.SGD(model[0].parameters(), lr=1e5)
    safe = SafeStep(inside, model, cross_entropy)
    inside.add_param_group({"params": model[1].parameters()})
    cross_entropy(model(batch[0]), batch[1]).backward()
    before = copy.deepcopy(model)
    safe.step(batch)
    starts = dict(before.named_parameters())
    made = {name: (now - starts[name]).detach() for name, now in model.named_parameters()}
    assert radius(before, cross_entropy, batch, made).r == pytest.approx(1)
    assert made["1.weight"].any()


def test_of_a_row_whose_targets_are_all_alike_the_radius_counts() -> None:
    model = nn.Linear(4, 2).double()
    batch = BATCH[0].double(), torch.full((8, 2), 0.5).double()  # two examples mixed half and half
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=1e4), model, cross_entropy)
    cross_entropy(model(batch[0]), batch[1]).backward()
    expected = radius(model, cross_entropy, batch, safe.optimizer)
    safe.step(batch)
    assert safe.report.largest_before == pytest.approx(expected.r)
    assert safe.report.largest_after == pytest.approx(1)


def test_ignored_rows_of_classes_in_the_second_dimension_do_not_count() -> None:
    model = nn.Conv1d(2, 3, 1).double()
    inputs, targets = torch.randn(4, 2, 5).double(), torch.randint(3, (4, 5))
    inputs[0, :, 0] *= 100
    targets[0, 0] = -100
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=1e4), model, cross_entropy)
    cross_entropy(model(inputs), targets).backward()
    expected = radius(model, cross_entropy, (inputs, targets), safe.optimizer)
    safe.step((inputs, targets))
    assert safe.report.largest_before == pytest.approx(expected.r)
    assert float(expected.rows[1:].min()) == expected.value


def test_a_loss_that_counts_its_calls_is_not_called() -> None:
    class Counting(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(logits, targets)

    loss, model = Counting(), nn.Linear(4, 3)
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=0.1), model, loss)
    loss(model(BATCH[0]), BATCH[1]).backward()
    safe.step(BATCH)
    assert float(loss.calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_a_loaders_own_batch_and_no_gradient_mode(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 10).to(dtype)
    inputs, targets = torch.randn(32, 64).to(dtype), torch.arange(32) % 10
    data = torch.utils.data.TensorDataset(inputs, targets)
    for batch in torch.utils.data.DataLoader(data, batch_size=16):
        safe = SafeStep(torch.optim.SGD(model.parameters(), lr=100.0), model, cross_entropy)
        safe.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        wide = copy.deepcopy(model).double()
        with torch.no_grad():
            safe.step(batch)
        starts = dict(wide.named_parameters())
        made = {name: (now.double() - starts[name]).detach() for name, now in model.named_parameters()}
        r = radius(wide, cross_entropy, (batch[0].double(), batch[1]), made).r
        assert safe.report.acted == 1
        assert r == pytest.approx(1, rel=8 * torch.finfo(dtype).eps)


def test_a_scheduler_around_the_optimizer_inside_is_no_obstacle() -> None:
    model = nn.Linear(4, 3)
    batch = torch.randn(8, 4), torch.arange(8) % 3
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inside, 1)  # puts a function of its own around the step
    safe = SafeStep(inside, model, nn.functional.cross_entropy)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    safe.step(batch)
    assert safe.report.steps == 1
