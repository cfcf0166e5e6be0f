"""What is wrong is mended, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.probes.gains.decay import decay

from .gained import INPUT_GAINS, INPUTS, OUTPUT_GAINS, Net, decay_by_name, usual


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
