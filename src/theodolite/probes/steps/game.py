"""Discretisation drift of games: the distance of two players' gradient steps from the flow of the game.

Player 1 has the parameters φ and moves along `f = −∇_φ L₁`, player 2 has θ and moves along `g = −∇_θ L₂`. In
one round player i makes m_i updates with learning rate h_i, which take it `T_i = m_i h_i` along its field:

    simultaneous    both see the other's parameters of the beginning of the round
    alternating     player 2 sees those that player 1 has at the end of it
    flow            φ̇ = T₁ f,  θ̇ = T₂ g, over one unit of time for each round

Round and flow differ in the second order. The modified flow has this difference as additional terms, and the
rounds follow it to the third order:

    φ̇ = T₁ (f − h₁/2·f_φ f − T₂/2·f_θ g)
    θ̇ = T₂ (g − h₂/2·g_θ g ∓ T₁/2·g_φ f)     − simultaneous, + alternating

with `f_φ` the derivative of f by φ. The *self terms*, `f_φ f` and `g_θ g`, are those of gradient descent (see
`drift`); the *interaction terms*, `f_θ g` and `g_φ f`, exist only in games. On the bilinear game
`L₁ = φθ = −L₂`, whose flow is a circle, there are only interaction terms, and simultaneous steps spiral
outwards because of them.

With `h₁ ≠ h₂` each player's clock runs at its own rate, as in the limit of small steps at a fixed ratio. A
formula with `h₁/2·f_θ g` instead is of one clock for both, of which φ is read at h₁ and θ at h₂; it holds for
one step and cannot be continued.

Second derivatives are products by double backward, in float64 on a copy.

References:
    Rosca, Wu, Dherin and Barrett, Discretization drift in two-player games, 2021.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.arguments import positive, whole
from theodolite.core.batches import in_float64
from theodolite.core.building import in_one_line
from theodolite.core.calling import ModelLoss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import naming_culprit
from theodolite.probes.steps.drift import distance_between, follow
from theodolite.probes.steps.players import (
    Losses,
    Players,
    both_losses,
    check_players,
    check_reach,
    each_player,
    require_graph,
    twice_differentiable_gradient,
)


@dataclass(frozen=True)
class PlayerDrift:
    """One player of a game, at the start of the rounds. Norms are those of gradients."""

    lr: float
    updates: int
    """In each round."""
    gradient: float
    """‖f‖."""
    self_term: float
    """`h₁/2·‖f_φ f‖`."""
    interaction_term: float
    """`T₂/2·‖f_θ g‖`."""
    losses: tuple[float, float, float]
    """At the start, after the steps, after the flow."""


@dataclass(frozen=True)
class GameDrift(Result):
    """Steps of two players beside the flows. Distances are between all weights. Made by `game_drift`."""

    kind: ClassVar[str] = "game drift"
    loads: ClassVar[bool] = True

    players: tuple[PlayerDrift, PlayerDrift]
    steps: int
    """Rounds."""
    alternating: bool
    distance: float
    """‖steps − flow‖: the drift."""
    modified: float
    """‖steps − modified flow‖: the drift that self and interaction terms do not explain."""
    self_only: float
    """‖steps − flow with the self terms alone‖."""
    interaction_only: float
    """‖steps − flow with the interaction terms alone‖."""
    length: float
    """‖steps − start‖."""
    speeds: tuple[float, float, float]
    """The length of `(T₁ f, T₂ g)`, to lowest order that of a round: at the start, after the steps, after the
    flow."""
    growth: tuple[float, float, float]
    """By how much the speed grows per round at the start, as the derivative of its logarithm: along the flow,
    by the self terms, by the interaction terms."""
    gradients: int
    """The number of gradients taken, each of both players."""
    converged: bool
    status: str

    @property
    def relative(self) -> float:
        """The drift relative to the length of the path."""
        return self.distance / self.length if self.length else math.nan

    @property
    def explained(self) -> float:
        """The share of the drift that the modified flow explains: 1 is all of it."""
        return self._share(self.modified)

    def _share(self, left: float) -> float:
        return 1 - left / self.distance if self.distance else math.nan

    def blocks(self) -> Iterator[Block]:
        """The steps, the distance from each flow, the terms of each player, the speed, and the status."""
        way = "alternating" if self.alternating else "simultaneous"
        rates = " and ".join(f"{each.lr:.4g}" for each in self.players)
        yield f"{counted(self.steps, f'{way} step')} with lr {rates}: length {self.length:.4g}"
        flows = {
            "of the game": (self.distance, None),
            "with self terms": (self.self_only, self._share(self.self_only)),
            "with interaction terms": (self.interaction_only, self._share(self.interaction_only)),
            "with both: modified": (self.modified, self.explained),
        }
        yield Table(("flow", "distance from it", "drift explained"), [(k, *v) for k, v in flows.items()])
        names = ("lr", "updates", "gradient", "self term", "interaction", "loss", "by steps", "by flow")
        yield Table(
            ("player", *names),
            [
                (n, each.lr, each.updates, each.gradient, each.self_term, each.interaction_term, *each.losses)
                for n, each in enumerate(self.players, 1)
            ],
        )
        start, stepped, flowed = self.speeds
        _, own, cross = self.growth
        yield (
            f"The length of a round, {start:.4g} at the start, is {stepped:.4g} after the steps and "
            f"{flowed:.4g} after the flow. At the start {_changed('the interaction terms', cross)}, and "
            f"{_changed('the self terms', own)}"
        )
        yield self.status


def _changed(what: str, rate: float) -> str:
    if abs(rate) < 1e-9:
        return f"{what} do not change it"
    return f"{what} {'lengthen' if rate > 0 else 'shorten'} it by {abs(rate):.2%} per round"


@exclusive()
def game_drift(
    players: Players,
    losses: Losses,
    batch: Any,
    *,
    lr: float | tuple[float, float],
    steps: int = 1,
    updates: int | tuple[int, int] = 1,
    alternating: bool = False,
    rtol: float = 1e-4,
) -> GameDrift:
    """How far gradient steps of two players end from the flow of their game, and what explains it.

    Args:
        players: two modules without common parameters, in the mode that they are in. Copies in float64 are
            moved, the modules themselves are not changed.
        losses: `loss(player_1, player_2, batch) -> scalar` for each player, in a tuple. A single function
            returns both losses, or that of player 1 in a zero-sum game, where player 2 has its negative.
            Random numbers drawn inside are the same in every evaluation.
        batch: what the losses take, such as a tensor or a tuple of tensors; given to them in float64.
        lr: the learning rate of both players, or one for each.
        steps: the number of rounds, on the same batch. In a round each player makes its updates.
        updates: in each round, of both players or of each.
        alternating: player 1 first, and player 2 sees its new parameters. Otherwise both see the parameters
            of the beginning of the round.
        rtol: the error allowed for flows, relative to the length of the first round.

    The game `L₁ = φθ = −L₂` has a circle as its flow, and every simultaneous step goes outwards:

    >>> players = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> for player in players:
    ...     _ = nn.init.ones_(player.weight)
    >>> loss = lambda one, two, batch: (one.weight * two.weight).sum()
    >>> found = game_drift(players, loss, None, lr=0.1, steps=9, rtol=1e-6)
    >>> round(found.speeds[1] / found.speeds[2], 6), round(math.sqrt(1 + 0.1**2) ** 9, 6)
    (1.045794, 1.045794)
    >>> found.explained > 0.9, found.players[0].self_term
    (True, 0.0)
    """
    rounds = _Rounds(
        each_player("lr", lr, positive),
        each_player("updates", updates, lambda name, value: whole(name, value, least=1)),
        bool(alternating),
    )
    whole("steps", steps, least=1)
    if not 0 < rtol < 1:
        raise UseError(f"rtol is {rtol!r}: give a fraction of the first round, such as 1e-4")
    game = Game(players, losses, batch)
    start = game.start
    first = game.velocity(start, rounds)
    speed = _speed(game, rounds, first)
    atol = rtol * speed
    end, problems = start, []
    for step in range(steps):
        end = game.after_round(end, rounds)
        if not bool(end.isfinite().all()):
            problems.append(f"the steps diverged at step {step + 1}")
            break
    flows = {
        name: follow(partial(game.velocity, rounds=rounds, terms=terms), start, float(steps), atol=atol)
        for name, terms in _FLOWS.items()
    }
    problems += [f"the {k} is exact only to {v.error:.1g}" for k, v in flows.items() if not v.converged]
    plain, self_only, interaction_only, modified = (one.end for one in flows.values())
    own, cross = (game.velocity(start, rounds, terms) - first for terms in (_SELF, _INTERACTION))
    return GameDrift(
        players=_players(game, rounds, (first, own, cross), (start, end, plain)),
        steps=steps,
        alternating=rounds.alternating,
        distance=distance_between(end, plain),
        modified=distance_between(end, modified),
        self_only=distance_between(end, self_only),
        interaction_only=distance_between(end, interaction_only),
        length=distance_between(end, start),
        speeds=(speed, game.speed(end, rounds), game.speed(plain, rounds)),
        growth=game.growth(start, rounds, (first, own, cross)),
        gradients=game.gradients,
        converged=not problems,
        status="; ".join(problems) or f"flows are exact to {atol:.1g}",
    )


def _speed(game: Game, rounds: _Rounds, first: Tensor) -> float:
    """The length of `(T₁ f, T₂ g)` at the start, which has to be finite and positive."""
    speed = float(first.norm())
    if not math.isfinite(speed) or speed == 0:
        both = zip(game.parts(first), rounds.times, strict=True)
        sizes = " and ".join(f"{float(part.norm()) / time:g}" for part, time in both)
        raise UseError(
            f"the gradients of the players have the norms {sizes}: there is no step to measure. Look at the "
            "batch, at the parameters, and at the losses"
        )
    return speed


def _players(
    game: Game, rounds: _Rounds, ways: tuple[Tensor, Tensor, Tensor], places: tuple[Tensor, Tensor, Tensor]
) -> tuple[PlayerDrift, PlayerDrift]:
    """What is said of each player.

    Args:
        game: whose players.
        rounds: how they move.
        ways: the velocity of the flow at the start, and what self terms and interaction terms add to it.
        places: the start, the end of the steps, the end of the flow.
    """
    gradient, own, cross = (
        [float(part.norm()) / time for part, time in zip(game.parts(way), rounds.times, strict=True)]
        for way in ways
    )
    start, stepped, flowed = (game.losses(at) for at in places)
    one, two = (
        PlayerDrift(
            rounds.lr[player],
            rounds.updates[player],
            gradient=gradient[player],
            self_term=own[player],
            interaction_term=cross[player],
            losses=(start[player], stepped[player], flowed[player]),
        )
        for player in (0, 1)
    )
    return one, two


_OTHER_DTYPE = re.compile(r"dtype|scalar type|input type", re.IGNORECASE)
"""In what torch says if the dtypes of two operands differ."""
_Terms = tuple[bool, bool]
"""Are self terms and interaction terms part of a flow?"""
_NONE, _SELF, _INTERACTION, _BOTH = (False, False), (True, False), (False, True), (True, True)
_FLOWS: dict[str, _Terms] = {
    "flow": _NONE,
    "flow with self terms": _SELF,
    "flow with interaction terms": _INTERACTION,
    "modified flow": _BOTH,
}


@dataclass(frozen=True)
class _Rounds:
    """How both players move."""

    lr: tuple[float, float]
    updates: tuple[int, int]
    alternating: bool

    @property
    def times(self) -> tuple[float, float]:
        """T₁ and T₂."""
        return self.lr[0] * self.updates[0], self.lr[1] * self.updates[1]


class Game:
    """The losses of two players, of float64 copies, as functions of all their parameters in one vector (P,).

    >>> players = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> game = Game(players, lambda one, two, _: (one.weight * two.weight).sum(), None)
    >>> game.velocity(torch.tensor([3.0, 4.0]).double(), _Rounds((1.0, 1.0), (1, 1), False))
    tensor([-4.,  3.], dtype=torch.float64)
    """

    def __init__(self, players: Players, losses: Losses, batch: Any) -> None:
        check_players(players)
        one, two = (unwrap(player) for player in players)
        pair = nn.ModuleList(copy.deepcopy((one, two))).double()
        both = both_losses(_in_float64(losses))

        def stacked(pair: nn.Module, batch: Any) -> Tensor:
            one, two = pair.children()
            values = both(one, two, batch[0])
            if not self.gradients and any(tensor.requires_grad for tensor in pair.parameters()):
                check_reach(values, (one, two))
            return torch.stack(values)

        self._objective = Objective(pair, ModelLoss(stacked), (in_float64(batch), None))
        first = [tensor for _, tensor in canonical_parameters(one) if tensor.requires_grad]
        self._first = sum(tensor.numel() for tensor in first)
        self.start = self._objective.flat(self._objective.tensors).detach().clone()
        """φ and θ of the players."""
        self.gradients = 0
        """The number of evaluations of both gradients so far."""

    def parts(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Those of player 1 and of player 2."""
        return at[: self._first], at[self._first :]

    def velocity(self, at: Tensor, rounds: _Rounds, terms: _Terms = _NONE) -> Tensor:
        """`(φ̇, θ̇)`, (P,), of the flow with some of its terms."""
        own, cross = terms
        at = at.detach().requires_grad_()
        (f_all, g_all) = self._gradients(at, twice=own or cross)
        (f, by_other_1), (by_other_2, g) = self.parts(-f_all), self.parts(-g_all)
        (h_1, h_2), (time_1, time_2) = rounds.lr, rounds.times
        found_1, found_2 = f.detach(), g.detach()
        if own or cross:
            turned = -1 if rounds.alternating else 1
            along_f, along_g = f.detach(), g.detach()
            # −(f_φ, f_θ) is the Hessian of L₁, which is symmetric: rows by φ of its product with a vector.
            bend_1 = own * h_1 / 2 * (f @ along_f) + cross * time_2 / 2 * (by_other_1 @ along_g)
            bend_2 = own * h_2 / 2 * (g @ along_g) + cross * turned * time_1 / 2 * (by_other_2 @ along_f)
            found_1 = found_1 - self.parts(_slope(bend_1, at))[0]
            found_2 = found_2 - self.parts(_slope(bend_2, at))[1]
        return torch.cat([time_1 * found_1, time_2 * found_2])

    def after_round(self, at: Tensor, rounds: _Rounds) -> Tensor:
        """φ and θ after the updates of one round."""
        (phi, theta), (h_1, h_2) = self.parts(at), rounds.lr
        moved = phi
        for _ in range(rounds.updates[0]):
            moved = moved - h_1 * self.parts(self._gradients(torch.cat([moved, theta]))[0])[0]
        seen = moved if rounds.alternating else phi
        for _ in range(rounds.updates[1]):
            theta = theta - h_2 * self.parts(self._gradients(torch.cat([seen, theta]))[1])[1]
        return torch.cat([moved, theta])

    def speed(self, at: Tensor, rounds: _Rounds) -> float:
        """The length of `(T₁ f, T₂ g)`; infinite where it is no number."""
        found = float(self.velocity(at, rounds).norm()) if bool(at.isfinite().all()) else math.inf
        return found if math.isfinite(found) else math.inf

    def growth(
        self, at: Tensor, rounds: _Rounds, ways: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[float, float, float]:
        """The derivative of the logarithm of the speed along each way."""
        at = at.detach().requires_grad_()
        f_all, g_all = self._gradients(at, twice=True)
        time_1, time_2 = rounds.times
        f, g = self.parts(f_all)[0], self.parts(g_all)[1]
        half = (time_1**2 * f.square().sum() + time_2**2 * g.square().sum()) / 2
        slope = _slope(half, at)
        flow, own, cross = (float(slope @ way / (2 * half.detach())) for way in ways)
        return flow, own, cross

    def losses(self, at: Tensor) -> tuple[float, float]:
        """The losses of both players, which may be infinite or nan."""
        one, two = self._values(at.detach()).tolist()
        return one, two

    def _values(self, at: Tensor) -> Tensor:
        ((batch, _),) = self._objective.draw()
        with self._objective.conditions():
            try:
                return self._objective.forward(self._objective.split(at), batch)
            except RuntimeError as error:
                if not _OTHER_DTYPE.search(str(error)):
                    raise
                raise UseError(
                    "a loss failed on float64 copies of the players and of the batch "
                    f"({in_one_line(error)}). Create tensors in it with the dtype of the batch, as in "
                    "torch.randn(8, 2, dtype=batch.dtype)"
                ) from error

    def _gradients(self, at: Tensor, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        """The gradients of both losses by all parameters, (P,) each; with a graph if needed twice."""
        at = at if at.requires_grad else at.detach().requires_grad_()
        values = self._values(at)
        self.gradients += 1
        require_graph(values)
        if twice:
            (first,), (second,) = (twice_differentiable_gradient(value, [at]) for value in values)
        else:
            first, second = (torch.autograd.grad(value, at, retain_graph=True)[0] for value in values)
        assert first is not None
        assert second is not None
        return first, second


def _slope(value: Tensor, at: Tensor) -> Tensor:
    """The gradient by the parameters of what may not depend on them."""
    if not value.requires_grad:
        return torch.zeros_like(at)
    with naming_culprit():
        (found,) = torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)
    return found


def _in_float64(losses: Any) -> Any:
    """Losses that are modules as copies in float64."""
    if isinstance(losses, tuple | list):
        return tuple(map(_in_float64, losses))
    return copy.deepcopy(losses).double() if isinstance(losses, nn.Module) else losses
