"""How scale vectors grow during training: the self-amplification of their maps.

By gradient flow `c_j = γ_j² − ‖w_j‖²` stays, so that `γ_j² = (c_j + √(c_j² + 4‖a_j‖²))/2` rises with the
effective column `a_j = γ_j w_j`, and with it the speed `γ_j² + ‖w_j‖² = √(c_j² + 4‖a_j‖²)` at which the
column learns. Weight decay, noise and optimizers that are not gradient descent depart from it. The law is
that of a plain vector: for a magnitude times a direction there is none, and nothing is foretold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.gains.scaled_maps import Map, Vector, find_maps, find_vectors, obstacles


@dataclass(frozen=True)
class Look:
    """One scale vector after some steps, as means over its columns; nan where a law does not hold for it."""

    step: int
    vector: str
    gain: float
    """γ_j²."""
    weight: float
    """‖w_j‖²."""
    speed: float
    """`γ_j² + ‖w_j‖²`."""
    flow: float
    """`√(c_j² + 4‖a_j‖²)`: what that would be if c_j were what it was at the first look."""
    balance: float
    """`γ_j² − ‖w_j‖²`."""


@dataclass
class Amplification:
    """A record of the scale vectors of a network in training. Made by `amplification`.

    Call `look(step)` every so many steps; it reads parameters and changes nothing.
    """

    model: nn.Module = field(repr=False)
    maps: tuple[Map, ...] = field(repr=False)
    rows: list[Look] = field(default_factory=list)
    _first: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @exclusive()
    def look(self, step: int) -> tuple[Look, ...]:
        """Read all vectors now, and keep what was read."""
        if self.rows and step <= self.rows[-1].step:
            raise UseError(f"step is {step}, and the last look was at {self.rows[-1].step}: steps go up")
        found = tuple(self._looked(step, one) for one in find_vectors(self.model, self.maps))
        self.rows += found
        return found

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the scale vectors."""
        return tuple(dict.fromkeys(row.vector for row in self.rows))

    def curve(self, vector: str) -> tuple[Look, ...]:
        """All looks at one vector."""
        if vector not in self.vectors:
            raise UseError(f"there is no look at a vector {vector!r}: there are {', '.join(self.vectors)}")
        return tuple(row for row in self.rows if row.vector == vector)

    def __str__(self) -> str:
        """A table of the first look and the last."""
        if not self.rows:
            return "no look was taken yet: call look(step)"
        name = max(map(len, ["scale vector", *self.vectors]))
        lines = [
            f"{'scale vector':<{name}}  {'steps':>11}  {'γ²':>15}  {'γ²+‖w‖²':>15}  {'by flow':>7}  "
            f"{'γ²−‖w‖²':>15}"
        ]
        for vector in self.vectors:
            first, last = (self.curve(vector)[place] for place in (0, -1))
            lines.append(
                f"{vector:<{name}}  {f'{first.step} → {last.step}':>11}  {_pair(first.gain, last.gain)}  "
                f"{_pair(first.speed, last.speed)}  {_number(last.flow):>7}  "
                f"{_pair(first.balance, last.balance)}"
            )
        return "\n".join([*lines, *obstacles(find_vectors(self.model, self.maps))])

    @torch.no_grad()
    def _looked(self, step: int, one: Vector) -> Look:
        start = self._first.setdefault(one.name, one.balance.clone())
        flow = (start.square() + 4 * one.effective_squares).sqrt()
        means = [
            values.mean().item()
            for values in (one.gain_squares, one.weight_squares, one.speeds, flow, one.balance)
        ]
        return Look(step, one.name, *means)


@exclusive()
def amplification(model: nn.Module, inputs: Any) -> Amplification:
    """Follow the scale vectors of a network's Input-Norms during training.

    Args:
        model: any module that `theodolite.dissect` understands, converted by `theodolite.surgery` or not.
        inputs: what it is called with.

    >>> import theodolite as th
    >>> torch.manual_seed(0)
    <...>
    >>> model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8, bias=False)).double()
    >>> x = torch.randn(64, 8).double()
    >>> record, optimizer = amplification(model, x), torch.optim.SGD(model.parameters(), lr=0.01)
    >>> for step in range(201):
    ...     if step % 100 == 0:
    ...         _ = record.look(step)
    ...     (model(x) - 3 * x).square().sum(1).mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> first, _, last = record.curve("0.weight")
    >>> last.speed > 2 * first.speed, abs(last.speed / last.flow - 1) < 0.01
    (True, True)
    """
    inner = unwrap(model)
    return Amplification(inner, find_maps(inner, inputs))


def _pair(first: float, last: float) -> str:
    return f"{'–' if math.isnan(first + last) else f'{first:.3g} → {last:.3g}':>15}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
