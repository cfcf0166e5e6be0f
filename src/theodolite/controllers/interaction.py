"""Gradients of two players with the interaction terms of their drift cancelled.

Simultaneous gradient steps of a game follow its flow with additional terms (see `probes.game_drift`). Those
in which one player's movement changes the other's gradient, the interaction terms, can turn a game that
circles into one that diverges. Added to the gradients with the opposite sign, they cancel to lowest order:

    φ.grad = ∇_φ L₁ − strength·h₂/2·∇_φ(∇_θ L₁ · v₂),   v₂ = ∇_θ L₂, constant
    θ.grad = ∇_θ L₂ − strength·h₁/2·∇_θ(∇_φ L₂ · v₁),   v₁ = ∇_φ L₁, constant

In a zero-sum game this is the penalty `h₂/4·‖∇_θ L‖²` on φ's loss. Consensus optimization penalises both
gradients for both players instead, and by that changes the flow that is followed.

References:
    Rosca, Wu, Dherin and Barrett, Discretization drift in two-player games, 2021, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.core.arguments import number, positive
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import group_of
from theodolite.probes.curvature.objective import twice_differentiable
from theodolite.probes.curvature.operator import naming_culprit
from theodolite.probes.steps.players import (
    Losses,
    Players,
    both_losses,
    check_players,
    each_player,
    require_own,
    twice_differentiable_gradient,
)

Gradients = Sequence[Tensor | None]
"""Of some parameters; None where nothing depends on one."""


@exclusive()
def cancel_interaction(
    players: Players,
    losses: Losses,
    batch: Any,
    *,
    lr: float | tuple[float, float],
    strength: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Fill `.grad` of both players: their gradients, without the interaction terms of the drift.

    Call it in place of `backward`, then let the optimizers of both players step. Gradients and corrections
    come from the same forward pass: dropout has one mask, and batch norms see the batch once for each time
    that the losses call them. What `.grad` held before is replaced.

    Args:
        players: two modules without common parameters, in training mode or not.
        losses: `loss(player_1, player_2, batch) -> scalar` for each player, in a tuple. A single function
            returns both losses, or that of player 1 in a zero-sum game, where player 2 has its negative.
        batch: what the losses take; on the right device.
        lr: the learning rates that the optimizers step with: one, or one for each player.
        strength: 1 cancels the terms, 0 gives the plain gradients.

    Returns:
        The losses of both players, without a graph.

    The correction is derived for gradient descent with simultaneous steps; with momentum or Adam it is a rule
    of thumb. It costs a second backward pass through both losses. An autocast has to be inside the losses.

    >>> one, two = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    >>> optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    >>> for player in (one, two):
    ...     _ = torch.nn.init.ones_(player.weight)
    >>> for _ in range(500):  # plain steps would end at √2·√(1 + 0.1²)⁵⁰⁰, which is 17
    ...     _ = cancel_interaction((one, two), lambda a, b, _: (a.weight * b.weight).sum(), None, lr=0.1)
    ...     optimizer.step()
    >>> round((one.weight.item() ** 2 + two.weight.item() ** 2) ** 0.5, 2)
    1.42
    """
    check_players(players)
    lr_1, lr_2 = each_player("lr", lr, positive)
    strength = number("strength", strength, least=0)
    for place, player in enumerate(players):
        if group_of(player) is not None:
            raise UseError(
                f"players[{place}] is wrapped in DistributedDataParallel, whose averaging does not see these "
                "gradients. Give the module inside, and average .grad over the processes"
            )
    both = both_losses(losses)
    own = [[tensor for tensor in player.parameters() if tensor.requires_grad] for player in players]
    with twice_differentiable():
        values = both(players[0], players[1], batch)
        first, second = (twice_differentiable_gradient(value, [*own[0], *own[1]]) for value in values)
    size = len(own[0])
    require_own((first[:size], second[size:]))
    found = [
        _corrected(first[:size], first[size:], second[size:], own[0], strength * lr_2 / 2),
        _corrected(second[size:], second[:size], first[:size], own[1], strength * lr_1 / 2),
    ]
    for tensors, gradients in zip(own, found, strict=True):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
    return values[0].detach(), values[1].detach()


def _corrected(
    own: Gradients, by_other: Gradients, others: Gradients, tensors: Sequence[Tensor], share: float
) -> Gradients:
    """The gradients of a player minus a share of the derivative of `by_other · others` by its parameters.

    Args:
        own: of the player's loss by its parameters.
        by_other: of the player's loss by the other's parameters.
        others: of the other's loss by the other's parameters.
        tensors: the player's.
        share: h/2 of the other.
    """
    pairs = [
        (one, other)
        for one, other in zip(by_other, others, strict=True)
        if one is not None and other is not None and one.requires_grad
    ]
    bends: Gradients = [None] * len(tensors)
    if share and pairs:
        with naming_culprit():
            bends = torch.autograd.grad(
                [one for one, _ in pairs],
                tensors,
                [other for _, other in pairs],
                retain_graph=True,
                allow_unused=True,
            )
    return [
        _difference(one, None if bend is None else share * bend) for one, bend in zip(own, bends, strict=True)
    ]


def _difference(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their difference, in memory of its own; None is zero."""
    if other is None:
        return None if one is None else one.detach().clone()
    return -other if one is None else one.detach() - other
