"""Feed-forward branches and mixtures of experts, against one expert at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state, vmap

from theodolite.core.errors import UseError
from theodolite.models.transformer import Experts, FeedForward


def expert(mixture: Experts, number: int, x):
    up = x @ mixture.up[number].T
    hidden = F.gelu(up) if mixture.gate is None else F.silu(x @ mixture.gate[number].T) * up
    return hidden @ mixture.down[number].T


@pytest.mark.parametrize("gated", [False, True])
def test_all_experts_active_under_an_indifferent_router_are_their_mean(gated):
    mixture = Experts(8, experts=3, active=3, gated=gated).double()
    mixture.router.weight.data.zero_()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mean = sum(expert(mixture, number, x) for number in range(3)) / 3
    torch.testing.assert_close(mixture(x), mean)


@pytest.mark.parametrize("gated", [False, True])
def test_each_token_gets_its_best_experts_weighted_by_their_softmax(gated):
    mixture = Experts(8, experts=5, active=2, gated=gated).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    out = mixture(x)
    for b in range(2):
        for t in range(3):
            logits = mixture.router.weight @ x[b, t]
            first, second = logits.argsort(descending=True)[:2].tolist()
            share = torch.sigmoid(logits[first] - logits[second])
            by_hand = share * expert(mixture, first, x[b, t]) + (1 - share) * expert(mixture, second, x[b, t])
            torch.testing.assert_close(out[b, t], by_hand)


def test_an_expert_nobody_chose_gets_no_gradient_and_the_router_does():
    mixture = Experts(8, experts=4, active=2)
    x = torch.randn(1, 1, 8)
    chosen = mixture.router(x).topk(2).indices.flatten().tolist()
    mixture(x).square().sum().backward()
    for number in range(4):
        assert bool(mixture.up.grad[number].any()) == (number in chosen)
    assert mixture.router.weight.grad.abs().max() > 0


def test_a_mixture_of_equal_experts_is_one_feed_forward():
    single = FeedForward(8, gated=True).double()
    mixture = Experts(8, experts=4, active=2, gated=True).double()
    for name in ("gate", "up", "down"):
        getattr(mixture, name).data = getattr(single, name).weight.data.expand(4, -1, -1).clone()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(mixture(x), single(x))


def test_mixtures_run_side_by_side_under_vmap():
    mixtures = [Experts(8, experts=4, active=2) for _ in range(3)]
    parameters, _ = stack_module_state(mixtures)
    x = torch.randn(2, 5, 8)
    together = vmap(lambda one: functional_call(mixtures[0], one, (x,)))(parameters)
    for number, mixture in enumerate(mixtures):
        torch.testing.assert_close(together[number], mixture(x))


@pytest.mark.parametrize(
    "experts, active, message",
    [
        (1, 1, "experts is 1: give at least 2, or 0"),
        (4, 1, "active is 1: give 2 to 4"),
        (4, 5, "active is 5: give 2 to 4"),
    ],
)
def test_impossible_mixtures_are_refused_with_the_fix(experts, active, message):
    with pytest.raises(UseError, match=message):
        Experts(8, experts=experts, active=active)
