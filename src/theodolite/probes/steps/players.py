"""Two players of a game: the modules, their losses, and values for both of them.

Player 1 descends its loss by its own parameters, and so does player 2. A GAN is a game of a discriminator and
a generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.probes.curvature.operator import naming_culprit, watching_own_functions

T = TypeVar("T")
Players = tuple[nn.Module, nn.Module]
PlayersLoss = Callable[[nn.Module, nn.Module, Any], Any]
"""`loss(player_1, player_2, batch)`, which returns a scalar, or the scalars of both players."""
Losses = PlayersLoss | tuple[PlayersLoss, PlayersLoss]
"""One for each player; or a single one, which returns both, or is player 1's in a zero-sum game."""


def check_players(players: Any) -> None:
    """Check that these are two modules that both train, without common parameters."""
    if not (isinstance(players, tuple | list) and len(players) == 2):
        raise UseError(f"players is {described(players)}: give a tuple of two torch.nn.Modules")
    for place, player in enumerate(players):
        if not isinstance(player, nn.Module):
            raise UseError(f"players[{place}] is {described(player)}, not a torch.nn.Module")
        if not any(tensor.requires_grad for tensor in player.parameters()):
            raise UseError(f"players[{place}] has no parameter that requires a gradient: both have to train")
    names = {id(tensor): name for name, tensor in canonical_parameters(players[0])}
    for name, tensor in canonical_parameters(players[1]):
        if id(tensor) in names and tensor.requires_grad:
            raise UseError(
                f"{names[id(tensor)]} of players[0] is {name} of players[1]: one parameter cannot descend "
                "two losses. Give each player a copy, or freeze it"
            )


def twice_differentiable_gradient(value: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a loss with a graph; None for tensors that it does not depend on.

    Operations without a second derivative are refused by name.
    """
    require_graph(value)
    # With a seed that requires a gradient every backward function is seen to need a derivative.
    seed = torch.ones_like(value, requires_grad=True)
    with naming_culprit(), watching_own_functions(value):
        return torch.autograd.grad(value, tensors, seed, create_graph=True, allow_unused=True)


def require_graph(value: Tensor) -> None:
    """Refuse a loss that has no gradient."""
    if not value.requires_grad:
        raise UseError("a loss depends on no parameter of the players: was it computed without a graph?")


def require_own(gradients: Sequence[Sequence[Tensor | None]]) -> None:
    """Refuse losses of which one depends on no parameter of its own player.

    Args:
        gradients: of the loss of each player by its own parameters, None where it does not depend on one.
    """
    for place, own in enumerate(gradients):
        if all(gradient is None for gradient in own):
            raise UseError(
                f"the loss of players[{place}] depends on none of its parameters. Does it use the players "
                "that it is called with, and are the losses in the order of the players?"
            )


def check_reach(values: tuple[Tensor, Tensor], players: Players) -> None:
    """Refuse losses that do not depend on the parameters of their players."""
    gradients = []
    for value, player in zip(values, players, strict=True):
        require_graph(value)
        own = [tensor for tensor in player.parameters() if tensor.requires_grad]
        gradients.append(torch.autograd.grad(value, own, retain_graph=True, allow_unused=True))
    require_own(gradients)


def both_losses(losses: Any) -> Callable[[nn.Module, nn.Module, Any], tuple[Tensor, Tensor]]:
    """The losses of both players as one function, whichever way they are given.

    >>> zero_sum = both_losses(lambda one, two, batch: batch.sum())
    >>> zero_sum(nn.Identity(), nn.Identity(), Tensor([1.0, 2.0]))
    (tensor(3.), tensor(-3.))
    """
    several = isinstance(losses, tuple | list)
    if not (all(map(callable, losses)) and len(losses) == 2 if several else callable(losses)):
        raise UseError(
            f"losses is {described(losses)}: give a function loss(player_1, player_2, batch) for each player "
            "in a tuple, or a single function"
        )

    def both(one: nn.Module, two: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if several:
            first, second = (_scalar(loss(one, two, batch)) for loss in losses)
            return first, second
        found = losses(one, two, batch)
        if isinstance(found, tuple | list) and len(found) == 2:
            return _scalar(found[0]), _scalar(found[1])
        return _scalar(found), -_scalar(found)

    return both


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UseError(
            f"a loss of (player_1, player_2, batch) returned {described(value)}, not one number for a "
            "player. Reduce it, as with .mean()"
        )
    return value.reshape(())


def each_player(name: str, value: Any, check: Callable[[str, Any], T]) -> tuple[T, T]:
    """A value for both players, or one for each, checked.

    >>> from theodolite.core.arguments import positive
    >>> each_player("lr", 0.1, positive), each_player("lr", (0.1, 0.2), positive)
    ((0.1, 0.1), (0.1, 0.2))
    """
    if not isinstance(value, tuple | list):
        return check(name, value), check(name, value)
    if len(value) != 2:
        raise UseError(f"{name} is {described(value)}: give one number, or one for each of two players")
    return check(f"{name}[0]", value[0]), check(f"{name}[1]", value[1])
