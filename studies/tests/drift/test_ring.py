"""The GAN of the ring: stacked networks against single ones, and the drift of rounds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from theodolite.controllers import cancel_interaction
from theodolite_studies.drift import ring

SEEDS, LR = 3, 0.3


def _single(stack: ring.Stacked, seed: int) -> nn.Sequential:
    """One network of a stack, of linear layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(stack.weights, stack.biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[2])
        layer.weight.data = weight[seed].detach().T.clone()
        layer.bias.data = bias[seed, 0].detach().clone()
        layers += [layer, nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _losses(judge: nn.Module, maker: nn.Module, batch: ring.Batch) -> tuple[Tensor, Tensor]:
    data, noise = batch
    made, yes = judge(maker(noise)), torch.ones(len(data), 1)
    bce = nn.functional.binary_cross_entropy_with_logits
    return bce(judge(data), yes) + bce(made, 1 - yes), bce(made, yes)


def _players() -> tuple[ring.Stacked, ring.Stacked]:
    torch.manual_seed(1)
    return ring.Stacked(1, SEEDS, width=5), ring.Stacked(2, SEEDS, width=5)


def _updated(arm: str, players: tuple[ring.Stacked, ring.Stacked], steps: int = 2) -> None:
    optimizers = [torch.optim.SGD(player.parameters(), lr=LR) for player in players]
    for step in range(steps):
        ring.update(arm, LR, players, optimizers, ring.batch_of(ring.mixture(), SEEDS, step))


@pytest.mark.parametrize("arm", ring.ARMS)
def test_a_stack_is_trained_as_its_networks_are_one_by_one(arm: str) -> None:
    players = _players()
    singles = [[_single(player, seed) for player in players] for seed in range(SEEDS)]
    _updated(arm, players)
    for seed, pair in enumerate(singles):
        judge, maker = pair
        optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in pair]
        for step in range(2):
            data, noise = (one[seed] for one in ring.batch_of(ring.mixture(), SEEDS, step))
            if arm == "cancelled":
                cancel_interaction((judge, maker), _losses, (data, noise), lr=LR)
            for own, optimizer in enumerate(optimizers):
                if arm == "simultaneous" and own == 0:
                    gradients = [
                        torch.autograd.grad(
                            _losses(judge, maker, (data, noise))[place], [*pair[place].parameters()]
                        )
                        for place in (0, 1)
                    ]
                if arm == "alternating":
                    found = torch.autograd.grad(
                        _losses(judge, maker, (data, noise))[own], [*pair[own].parameters()]
                    )
                elif arm == "simultaneous":
                    found = gradients[own]
                if arm != "cancelled":
                    for tensor, gradient in zip(pair[own].parameters(), found, strict=True):
                        tensor.grad = gradient
                optimizer.step()
        x = torch.linspace(-2, 2, 10).view(5, 2)
        for player, one in zip(players, pair, strict=True):
            assert torch.allclose(player(x.expand(SEEDS, 5, 2))[seed], one(x), atol=1e-5), seed


@pytest.mark.parametrize("arm", ring.ARMS)
def test_a_network_that_diverges_does_not_touch_the_others(arm: str) -> None:
    players = _players()
    others = copy.deepcopy(players)
    with torch.no_grad():
        others[0].weights[1][0] = torch.nan
    _updated(arm, players)
    _updated(arm, others)
    for player, other in zip(players, others, strict=True):
        for one, same in zip(player.parameters(), other.parameters(), strict=True):
            assert torch.equal(one[1:], same[1:])
            assert not bool(same[0].isfinite().all())


def test_a_tiny_training_measures_distances_from_data() -> None:
    (row,) = ring.training("cancelled", 0.1, steps=2, every=1, seeds=2)
    assert [len(own) for own in row["distances"]] == [2, 2]
    # Samples of an untrained generator lie near 0: each direction sees a ring of radius 1.5 as σ = 1.5/√2.
    assert all(0.5 < value < 1.5 for own in row["distances"] for value in own)
    assert 0 < row["floor"] < 0.1
    (row,) = ring.training("simultaneous", 1e30, steps=2, every=1, seeds=2)
    assert row["distances"][0][1] is None


def test_the_drift_of_rounds_is_of_the_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    way = "alternating, 2 to 1"
    monkeypatch.setattr(ring, "WAYS", {way: ring.WAYS[way]})
    large, small = ring.rounds(1, moments=(0,), sizes=(0.02, 0.01), rtol=1e-4)
    assert large["exact"]
    assert large["game"] == way
    assert large["distance"] / small["distance"] == pytest.approx(4, rel=0.2)
    assert large["unexplained"] / small["unexplained"] == pytest.approx(8, rel=0.3)
    # Five rounds of two updates with h and one with h/2 from the same start.
    torch.manual_seed(1)
    players = ring.Stacked(1, 1), ring.Stacked(2, 1)
    start = torch.cat([one.detach().flatten() for player in players for one in player.parameters()])
    batch = ring.batch_of(ring.mixture(), 1, 20_000)
    for _ in range(5):
        for player, lr in ((0, 0.02), (0, 0.02), (1, 0.01)):
            tensors = list(players[player].parameters())
            found = torch.autograd.grad(ring.losses(*players, batch)[player], tensors)
            with torch.no_grad():
                for tensor, gradient in zip(tensors, found, strict=True):
                    tensor -= lr * gradient
    end = torch.cat([one.detach().flatten() for player in players for one in player.parameters()])
    assert large["length"] == pytest.approx(float((end - start).norm()), rel=1e-3)
