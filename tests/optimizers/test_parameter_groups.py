"""What optimizers do to each tensor, and corrected groups that change nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.probes.gains.gained import INPUT_GAINS, INPUTS, OUTPUT_GAINS, Net, decay_by_name, usual
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.optimizers.parameter_groups import handlings, is_decoupled
from theodolite.probes.gains.decay import decay


def adamw_by_hand(
    model: nn.Module, batches: list[Tensor], decays: list[dict[str, float]]
) -> dict[str, Tensor]:
    """AdamW as its paper has it, the decay of each step and tensor given."""
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(value) for name, value in values.items()}
    v = {name: torch.zeros_like(value) for name, value in values.items()}
    for step, (batch, decayed) in enumerate(zip(batches, decays, strict=True), start=1):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss = torch.func.functional_call(model, leaves, (batch,)).square().mean()
        for (name, value), g in zip(
            values.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            values[name] = value * (1 - 0.01 * decayed[name]) - 0.01 * update
    return values


def test_how_a_class_decays_that_has_the_name_of_one_with_a_choice_is_not_guessed() -> None:
    """pytorch_optimizer's DiffGrad has an option for it; that of torch-optimizer adds λ·W to the gradient."""

    class DiffGrad(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "weight_decay": 0.2})

    made = DiffGrad([nn.Parameter(torch.ones(2))])
    assert is_decoupled(made, made.param_groups[0]) is None


def test_mended_in_mid_training_state_stays_and_only_the_decay_changes() -> None:
    model = Net().double()
    batches = list(torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1)).double())
    before = {name: 0.2 if p.dim() > 1 else 0.0 for name, p in model.named_parameters()}
    after = before | dict.fromkeys(INPUT_GAINS, 0.2)
    expected = adamw_by_hand(model, batches, 3 * [before] + 3 * [after])
    optimizer = usual(model)
    for step, batch in enumerate(batches):
        if step == 3:
            decay(model, INPUTS.double(), optimizer).apply(inputs=True)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], rtol=1e-10, atol=1e-12, msg=name)


def test_a_split_group_keeps_every_other_option_and_names_stay_beside_their_tensors() -> None:
    model = Net()
    parameters = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=torch.tensor(0.01), betas=(0.8, 0.9), weight_decay=0.2, foreach=False
    )
    old = optimizer.param_groups[0]
    decay(model, INPUTS, optimizer).apply()
    kept, new = optimizer.param_groups
    assert kept is old
    assert set(new["param_names"]) == OUTPUT_GAINS
    for group in (kept, new):
        assert [name for name, p in parameters if any(p is q for q in group["params"])] == group[
            "param_names"
        ]
    options = {key: kept[key] for key in kept if key not in ("params", "param_names", "weight_decay", "lr")}
    assert options == {key: new[key] for key in options}
    assert (kept["weight_decay"], new["weight_decay"]) == (0.2, 0.0)
    assert kept["lr"] == new["lr"]
    assert kept["lr"] is not new["lr"], "a schedule would change both twice"


def test_tensors_move_to_a_group_that_has_their_options_and_not_to_one_that_differs() -> None:
    model = Net()
    twin = usual(model)
    decay(model, INPUTS, twin).apply(inputs=True)
    assert len(twin.param_groups) == 2
    other = usual(model)
    other.param_groups[0]["lr"] = 0.02
    decay(model, INPUTS, other).apply(inputs=True)
    assert len(other.param_groups) == 3
    # At half the learning rate, twice the decay is the same fraction of the tensor.
    assert (other.param_groups[2]["lr"], other.param_groups[2]["weight_decay"]) == (0.01, 0.4)
    averaged = usual(model)
    averaged.param_groups[0]["betas"] = (0.8, 0.9)
    decay(model, INPUTS, averaged).apply(inputs=True)
    assert [group["betas"][0] for group in averaged.param_groups] == [0.8, 0.9, 0.9]
    assert [group["weight_decay"] for group in averaged.param_groups] == [0.2, 0.0, 0.2]


def test_new_groups_are_refused_once_a_schedule_has_counted_them() -> None:
    model = Net()
    mixed = torch.optim.AdamW(model.parameters(), weight_decay=0.2)
    torch.optim.lr_scheduler.StepLR(mixed, 1)
    with pytest.raises(UseError, match=r"1 more group, .*before making the schedule"):
        decay(model, INPUTS, mixed).apply()
    assert len(mixed.param_groups) == 1
    twin = usual(model)
    schedule = torch.optim.lr_scheduler.StepLR(twin, 1, gamma=0.5)
    decay(model, INPUTS, twin).apply(inputs=True)
    twin.step()
    schedule.step()
    assert [group["lr"] for group in twin.param_groups] == [0.005, 0.005]


def test_a_schedule_that_was_made_for_what_a_wrapper_holds_has_counted_too() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    mixed = torch.optim.AdamW(model.parameters(), weight_decay=0.2)
    torch.optim.lr_scheduler.StepLR(mixed, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(mixed)
    with pytest.raises(UseError, match=r"1 more group, .*before making the schedule"):
        decay(model, INPUTS, wrapped).apply()
    assert len(mixed.param_groups) == 1


def test_what_is_wrong_for_sure_is_mended_unasked_and_advice_is_not() -> None:
    model = Net()
    spared = usual(model)
    before = decay_by_name(model, spared)
    decay(model, INPUTS, spared).apply()
    assert decay_by_name(model, spared) == before
    everything = torch.optim.AdamW(model.parameters(), weight_decay=0.2)
    for inputs in (False, True):  # of what decays already there is nothing to advise
        decay(model, INPUTS, everything).apply(inputs=inputs)
        now = decay_by_name(model, everything)
        assert {name for name, value in now.items() if value == 0} == OUTPUT_GAINS


def test_groups_for_a_new_optimizer_leave_the_old_one_as_it_is() -> None:
    model = Net()
    optimizer = usual(model)
    before = decay_by_name(model, optimizer)
    made = torch.optim.AdamW(decay(model, INPUTS, optimizer).groups(inputs=True))
    assert decay_by_name(model, optimizer) == before
    assert not decay(model, INPUTS, made).advised
    assert set(decay_by_name(model, made)) == set(before)


def optimizers() -> list[Any]:
    torch_own = [
        *(
            ("SGD", {"momentum": 0.9}),
            ("Adam", {}),
            ("AdamW", {}),
            ("Adagrad", {}),
            ("Adadelta", {"lr": 0.1}),
        ),
        *(("Adamax", {}), ("ASGD", {}), ("RMSprop", {}), ("NAdam", {}), ("RAdam", {}), ("Adafactor", {})),
        *(
            ("NAdam", {"decoupled_weight_decay": True}),
            ("RAdam", {"decoupled_weight_decay": True}),
            ("Muon", {}),
        ),
    ]
    found = [(getattr(torch.optim, name), options) for name, options in torch_own]
    return [pytest.param(kind, options, id=f"{kind.__name__}-{len(options)}") for kind, options in found]


@pytest.mark.parametrize("kind, options", optimizers())
def test_coupled_or_decoupled_is_what_steps_along_no_gradient_do(kind: Any, options: dict[str, Any]) -> None:
    """Two steps with gradients of zero: decoupled decay leaves W·(1 − lr·λ)², and nothing else does."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [4.0, 0.5]], dtype=torch.float64))
    start = weight.detach().clone()
    optimizer = kind([weight], **{"lr": 0.01, "weight_decay": 0.3} | options)
    found, _ = handlings({"w": weight}, [optimizer])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    lr = options.get("lr", 0.01)
    decoupled = torch.allclose(weight, start * (1 - lr * 0.3) ** 2, rtol=1e-9)
    assert found["w"].decoupled is decoupled
    if decoupled:
        assert found["w"].rate == pytest.approx(lr * 0.3)
    else:
        assert math.isnan(found["w"].rate)


@pytest.mark.parametrize("fixed", [False, True])
def test_the_rate_is_the_fraction_lost_in_a_step(fixed: bool) -> None:
    Lion = pytest.importorskip("pytorch_optimizer").Lion
    weight = nn.Parameter(torch.full((2, 2), 2.0))
    optimizer = Lion([weight], lr=0.1, weight_decay=0.3, weight_decouple=True, fixed_decay=fixed)
    found, _ = handlings({"w": weight}, [optimizer])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert found["w"].rate == pytest.approx(1 - weight[0, 0].item() / 2, rel=1e-5)


def test_coupled_decay_is_said_to_go_through_the_preconditioner() -> None:
    model = Net()
    said = str(decay(model, INPUTS, torch.optim.Adam(model.parameters(), weight_decay=0.1)))
    assert "Adam, coupled (λ·W joins the gradient and goes through its preconditioner)" in " ".join(
        said.split()
    )


class Renamed(torch.optim.SGD):
    """Its decay has another name, and torch would not know it."""

    def __init__(self, parameters: Any, wd: float) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            del group["weight_decay"]
            group["wd"] = wd


def test_an_optimizer_without_the_option_may_decay_or_not() -> None:
    model = Net()
    audit = decay(model, INPUTS, Renamed(model.parameters(), 0.1))
    assert {row.now.state for row in audit.rows} == {"unknown"}
    assert {(row.verdict, row.should) for row in audit.rows} == {("note", None)}
    said = " ".join(str(audit).split())
    assert said.startswith("Weight decay is wrong for none of 7 gains, and not known for 7.")
    assert "Whether weights decay is not known: Renamed has no option weight_decay." in said
    assert "No weight decays" not in said
    assert "No weight decays" in str(decay(model, INPUTS, torch.optim.Rprop(model.parameters())))


def test_a_warm_up_that_starts_at_nothing_hides_nothing() -> None:
    model = Net()
    optimizer = usual(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    audit = decay(model, INPUTS, optimizer)
    assert {row.should for row in audit.advised} == {0.2}
    assert {row.now.rate for row in audit.rows if row.kind == "weight"} == {0.01 * 0.2}
