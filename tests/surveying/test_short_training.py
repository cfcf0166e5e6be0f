"""A few steps of AdamW: which lower the loss, are made once, and train on no batch that is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models import ResidualMLP
from theodolite.surveying import short_training
from theodolite.surveying.budget import TooLong
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.short_training import RATES, STEPS, train, wake

from ..probes.stream.toy_networks import COUNTING, DIFFUSION, noisy_images


def context(workload: Any, **changes: Any) -> SurveyContext:
    return SurveyContext(workload, workload.size, **changes)


@pytest.mark.parametrize("workload", [DIFFUSION, COUNTING], ids=lambda one: one.name)
@pytest.mark.parametrize("seed", range(2))
def test_a_few_steps_lower_the_loss_and_move_everything(workload: Any, seed: int) -> None:
    site = context(workload, seed=seed)
    found = wake(site, workload.size)
    assert found.learns
    assert len(found.losses) == STEPS <= 10
    new = site.build(workload.size)
    with torch.no_grad():
        assert site.evaluate(found.model) < site.evaluate(new)
    trained = dict(found.model.named_parameters())
    for name, tensor in new.named_parameters():
        if tensor.requires_grad and "key.bias" not in name:  # which no softmax notices
            assert not torch.equal(tensor, trained[name]), name


def test_they_are_made_once_and_depend_on_the_seed_alone() -> None:
    site = context(DIFFUSION)
    first = wake(site, DIFFUSION.size)
    assert wake(site, DIFFUSION.size) is first
    again, other = (wake(context(DIFFUSION, seed=seed), DIFFUSION.size) for seed in (0, 1))
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    assert first.losses == again.losses != other.losses


def test_the_batch_that_is_measured_is_not_trained_on() -> None:
    drawn = []

    def draw(seed: int, step: int) -> Any:
        drawn.append(step)
        return noisy_images(seed, step)

    site = context(replace(DIFFUSION, batch=draw))
    _ = site.batch
    drawn.clear()
    wake(site, DIFFUSION.size)
    assert drawn == list(range(1, STEPS + 1))


def test_a_rate_that_raises_the_loss_gives_way_to_a_lower_one() -> None:
    site = context(DIFFUSION)
    batches = [site.draw(step) for step in range(1, STEPS + 1)]
    assert train(site, DIFFUSION.size, batches, [100.0, RATES[0]]).rate == RATES[0]
    assert train(site, DIFFUSION.size, batches).rate == RATES[0]


def test_a_loss_that_does_not_stay_finite_and_too_much_work_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(width: int, depth: int) -> nn.Module:
        model = ResidualMLP(width, depth, inputs=8, outputs=2)
        model.readout.weight.register_hook(lambda gradient: gradient * float("nan"))
        return model

    def batch(seed: int, step: int) -> Any:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        return inputs, (inputs.sum(1) > 0).long()

    broken = replace(COUNTING, build=explode, batch=batch, loss=nn.functional.cross_entropy)
    with pytest.raises(UseError, match="the loss is nan after 1 steps of AdamW"):
        wake(context(broken), Size(32, 2))
    monkeypatch.setattr(short_training, "WORK", 1.0)
    with pytest.raises(TooLong, match="8 steps of 32 × 2 would take"):
        wake(context(DIFFUSION), DIFFUSION.size)


def test_batches_are_cut_to_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        short_training,
        "_steps",
        lambda context, model, rate, batches: [float(len(batch[1])) for batch in batches],
    )
    large = replace(DIFFUSION, batch=lambda seed, step: noisy_images(seed, step, 100))
    assert set(wake(context(large), Size(32, 2)).losses) == {short_training.MOST_EXAMPLES}
    forward = context(large).forward_work(large.build(32, 2), noisy_images(0, 0, 8)).total
    monkeypatch.setattr(short_training, "WORK", 3 * STEPS * forward)
    (examples,) = set(wake(context(large), Size(32, 2)).losses)
    assert 7 <= examples <= 9
