"""Noise along training: the explicit sums, and a training that is not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError
from theodolite.probes import Noise, NoiseMeter
from theodolite.probes.noise.meter import MOST_BLOCKS
from theodolite.probes.noise.metric import root_factors

from .test_noise import Place, half_square

DIM, B = 6, 3
G = torch.linspace(0.2, 0.7, DIM).double()


def drawn(steps: int, microbatches: int, spread: float = 1.0) -> Tensor:
    """Examples x, (steps, microbatches, B, DIM); of a place at G their gradients are G − x."""
    generator = torch.Generator().manual_seed(0)
    return spread * torch.randn(steps, microbatches, B, DIM, generator=generator).double()


def run(inputs: Tensor, *, divided: bool = True, **options: Any) -> NoiseMeter:
    """A loop that moves nothing."""
    model = Place(G)
    with NoiseMeter(model, examples=B, **options) as meter:
        for step in inputs:
            for part in step:
                loss = half_square(model(part), None)
                (loss / len(step) if divided else loss).backward()
            meter.step()
            model.zero_grad()
    return meter


def explicit(inputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Noise and signal of each step: products of different microbatches, and their variance times B."""
    means = (G - inputs.mean(2)).numpy()
    signals, noises = [], []
    for step in means:
        number = len(step)
        products = step @ step.T
        signals.append((products.sum() - np.trace(products)) / number / (number - 1))
        noises.append(B * step.var(0, ddof=1).sum())
    return np.array(noises), np.array(signals)


@pytest.mark.parametrize("microbatches", [2, 5])
@pytest.mark.parametrize("steps", [7, 150])
def test_it_averages_the_estimates_of_each_step(microbatches: int, steps: int) -> None:
    inputs = drawn(steps, microbatches)
    noises, signals = explicit(inputs)
    found = run(inputs).result()
    assert found.whole.noise == pytest.approx(noises.mean(), rel=1e-9)
    assert found.whole.signal == pytest.approx(signals.mean(), rel=1e-9)
    assert found.critical == pytest.approx(noises.mean() / signals.mean(), rel=1e-9)
    assert (found.steps, found.units, found.examples) == (
        steps,
        steps * microbatches,
        steps * microbatches * B,
    )
    assert (found.batch, found.microbatch) == (microbatches * B, B)
    assert len(found.along) <= MOST_BLOCKS
    assert found.along[-1].step == steps
    summed = run(inputs, divided=False).result()
    assert summed.critical == pytest.approx(found.critical, rel=1e-9)


def test_its_interval_holds_the_truth_and_narrows_with_the_steps() -> None:
    truth = DIM / float(G.square().sum())  # Σ is the identity
    widths = []
    for steps in (100, 1600):
        found = run(drawn(steps, 2)).result()
        assert found.low is not None
        assert found.high is not None
        assert found.low < truth < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2.5


def test_with_a_halflife_earlier_steps_fade() -> None:
    inputs = drawn(40, 2)
    noises, signals = explicit(inputs)
    weights = 0.5 ** (np.arange(39, -1, -1) / 5)
    found = run(inputs, halflife=5).result()
    assert found.whole.noise == pytest.approx(np.average(noises, weights=weights), rel=1e-9)
    assert found.whole.signal == pytest.approx(np.average(signals, weights=weights), rel=1e-9)
    # Whoever forgets remembers only the new noise, four times as large, of 200 steps after 200 others.
    both = torch.cat([drawn(200, 2), drawn(200, 2, spread=2.0)])
    forgetful = run(both, halflife=20).result()
    assert forgetful.whole.noise == pytest.approx(4 * DIM, rel=0.2)
    assert len(forgetful.along) <= MOST_BLOCKS
    assert run(both).result().whole.noise == pytest.approx(2.5 * DIM, rel=0.2)


def trained(meter: Callable[[nn.Module, torch.optim.Optimizer], NoiseMeter] | None) -> tuple[Any, Any]:
    """A training with accumulation, clipping and AdamW; the weights at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=False), nn.Dropout(0.2), nn.Linear(4, 9))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watching = None if meter is None else meter(model, optimizer)
    for _ in range(12):
        for _ in range(3):
            tokens = torch.randint(9, (5, 7))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 9)
            (loss / 3).backward()
        if watching is not None:
            watching.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    found = None
    if watching is not None:
        found = watching.result()
        watching.close()
    assert not any(tensor._backward_hooks for tensor in model.parameters())
    return [*model.state_dict().values(), torch.get_rng_state()], found


def test_the_training_is_the_same_bit_by_bit_and_clipping_after_it_does_not_count() -> None:
    plain, _ = trained(None)
    for make in (
        lambda model, optimizer: NoiseMeter(model, examples=5),
        lambda model, optimizer: NoiseMeter(model, examples=5, optimizer=optimizer),
    ):
        watched, found = trained(make)
        assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
        assert found.whole.noise > 0
        assert [one.name for one in found.tensors] == ["0.weight", "2.bias"]
    assert found.optimizer == "AdamW"
    assert found.steps == 10  # not before the optimizer has a state


def test_in_the_coordinates_of_an_optimizer_each_gradient_has_its_factors() -> None:
    inputs = drawn(20, 2)
    model = Place(G)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, betas=(0.9, 0.5))  # hardly moves
    factors = []
    with NoiseMeter(model, examples=B, optimizer=optimizer) as meter:
        for step in inputs:
            for part in step:
                (half_square(model(part), None) / 2).backward()
            meter.step()
            optimizer.step()
            model.zero_grad()
            factors.append(root_factors(optimizer, dict(model.named_parameters()))["at"])
    found = meter.result()
    # The factors are those before the step that came before, which these gradients have no part in.
    noises, signals = [], []
    for factor, step in zip(factors, inputs[2:], strict=False):
        one, other = factor * (G - step.mean(1))
        signals.append(float(one @ other))
        noises.append(B * float((one - other).square().sum()) / 2)
    assert found.steps == 18
    assert found.whole.noise == pytest.approx(np.mean(noises), rel=1e-5)
    assert found.whole.signal == pytest.approx(np.mean(signals), rel=1e-5)


def test_a_learning_rate_for_each_tensor_weighs_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Place(G[:2]), Place(G[2:])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.one(x[..., :2]), self.two(x[..., 2:])], -1)

    inputs, model = drawn(30, 2), Two()
    groups = [{"params": model.one.parameters(), "lr": 0.5}, {"params": model.two.parameters(), "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with NoiseMeter(model, examples=B, optimizer=optimizer) as meter:
        for step in inputs:
            for part in step:
                (half_square(model(part), None) / 2).backward()
            meter.step()
            model.zero_grad()
    found = meter.result()
    means = (G - inputs.mean(2)).numpy()
    weights = np.array([0.5] * 2 + [3.0] * 4)
    signal = (means[:, 0] * means[:, 1] * weights).sum(1).mean()
    noise = B * ((means[:, 0] - means[:, 1]) ** 2 * weights).sum(1).mean() / 2
    assert (found.whole.noise, found.whole.signal) == pytest.approx((noise, signal), rel=1e-9)


def test_sparse_gradients_count_as_dense_ones_do() -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(9, 4, sparse=sparse).double()
        with NoiseMeter(model, examples=5) as meter:
            for step in range(4):
                for part in range(2):
                    tokens = torch.randint(9, (5,), generator=torch.Generator().manual_seed(2 * step + part))
                    model(tokens).square().sum(1).mean().backward()
                meter.step()
                model.zero_grad()
        found.append(meter.result().whole)
    assert (found[0].noise, found[0].signal) == pytest.approx((found[1].noise, found[1].signal), rel=1e-9)


def test_steps_that_say_nothing_are_left_out_and_named() -> None:
    inputs = drawn(6, 2)
    truth = run(inputs).result().whole
    model = Place(G)
    with NoiseMeter(model, examples=B) as meter:
        for step in [*inputs[:3], torch.full((2, B, DIM), np.inf).double(), *inputs[3:], inputs[0, :1]]:
            for part in step:
                (half_square(model(part), None) / 2).backward()
            meter.step()
            model.zero_grad()
    found = meter.result()
    assert (found.whole.noise, found.whole.signal) == pytest.approx((truth.noise, truth.signal), rel=1e-9)
    assert "left out: 1 step with one microbatch" in found.notes
    assert "left out: 1 step with gradients that are not finite" in found.notes


def test_wrong_use_is_refused_with_what_to_do() -> None:
    inputs = drawn(3, 2)
    with pytest.raises(UseError, match=r"one backward pass in all.*Accumulate two or more"):
        run(inputs[:, :1])
    model = Place(G)
    meter = NoiseMeter(model, examples=B)
    with pytest.raises(UseError, match="no backward pass since the last step"):
        meter.step()
    with pytest.raises(UseError, match="0 steps of training"):
        meter.result()
    for part in (*inputs[0], *inputs[1]):
        half_square(model(part), None).backward()
    meter.step()
    for part in inputs[2]:  # gradients pile up
        half_square(model(part), None).backward()
    with pytest.raises(UseError, match="zero them after each step"):
        meter.step()
    meter.close()
    with pytest.raises(UseError, match="the meter is closed"):
        meter.step()
    with pytest.raises(UseError, match="examples is 0"):
        NoiseMeter(model, examples=0)
    with pytest.raises(UseError, match="halflife is -1"):
        NoiseMeter(model, examples=1, halflife=-1)


def test_the_result_is_read_back(tmp_path: Path) -> None:
    found = run(drawn(100, 2)).result()
    assert Noise.load(found.save(tmp_path / "noise.json")) == found
    assert "along training" in found.save(tmp_path / "noise.html").read_text()
    assert "in 100 steps" in str(found)


def test_replicas_with_and_without_accumulation_measure_what_one_process_does(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).with_name("programs") / "noise_meter.py")
