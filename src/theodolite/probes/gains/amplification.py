"""How scale vectors grow during training: the self-amplification of their maps.

Gradient flow conserves `c_j = γ_j² − ‖w_j‖²`, so `γ_j² = (c_j + √(c_j² + 4‖a_j‖²))/2` rises with the
effective column `a_j = γ_j w_j`, and with it the speed `γ_j² + ‖w_j‖² = √(c_j² + 4‖a_j‖²)` at which the
column learns. Weight decay, noise and optimizers other than gradient descent depart from it. The law is
that of a plain vector; there is none for a magnitude times a direction, and nothing is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number
from theodolite.probes.gains.scaled_maps import ScaledMap, ScaleVector, find_maps, find_vectors, obstacles


@dataclass(frozen=True)
class AmplificationRow:
    """One scale vector at one step, as means over its columns; nan where a law does not hold for it."""

    step: int
    vector: str
    gain: float
    """γ_j²."""
    weight: float
    """‖w_j‖²."""
    speed: float
    """`γ_j² + ‖w_j‖²`."""
    flow: float
    """`√(c_j² + 4‖a_j‖²)`: the speed if c_j had stayed as it was at the first record."""
    balance: float
    """`γ_j² − ‖w_j‖²`."""


@dataclass
class Amplification(Result):
    """The scale vectors of a network in training. Made by `amplification`.

    Call `record(step)` every so many steps; it reads parameters and changes nothing.
    """

    kind: ClassVar[str] = "amplification"
    model: nn.Module = field(repr=False, compare=False)
    maps: tuple[ScaledMap, ...] = field(repr=False, compare=False)
    rows: list[AmplificationRow] = field(default_factory=list)
    _first: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @exclusive()
    def record(self, step: int) -> tuple[AmplificationRow, ...]:
        """Read all vectors now, and keep what was read."""
        if self.rows and step <= self.rows[-1].step:
            raise UseError(f"step is {step}, and the last record was at {self.rows[-1].step}: steps go up")
        found = tuple(self._read(step, one) for one in find_vectors(self.model, self.maps))
        self.rows += found
        return found

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the scale vectors."""
        return tuple(dict.fromkeys(row.vector for row in self.rows))

    def curve(self, vector: str) -> tuple[AmplificationRow, ...]:
        """All records of one vector."""
        if vector not in self.vectors:
            raise UseError(f"there is no record of a vector {vector!r}: there are {', '.join(self.vectors)}")
        return tuple(row for row in self.rows if row.vector == vector)

    def blocks(self) -> Iterator[Block]:
        """The first record and the last."""
        if not self.rows:
            yield "nothing is recorded yet: call record(step)"
            return
        ends = [(self.curve(vector)[0], self.curve(vector)[-1]) for vector in self.vectors]
        pair = [Column(name, side="right") for name in ("steps", "γ²", "γ²+‖w‖²", "by flow", "γ²−‖w‖²")]
        yield Table(
            ("scale vector", *pair),
            [
                (
                    first.vector,
                    f"{first.step} → {last.step}",
                    _change(first.gain, last.gain),
                    _change(first.speed, last.speed),
                    number(last.flow),
                    _change(first.balance, last.balance),
                )
                for first, last in ends
            ],
        )
        yield obstacles(find_vectors(self.model, self.maps))

    def table(self) -> Table:
        """Every record of every vector."""
        return Table(
            ("step", "scale vector", "γ²", "‖w‖²", "γ²+‖w‖²", "by flow", "γ²−‖w‖²"),
            [
                (row.step, row.vector, row.gain, row.weight, row.speed, row.flow, row.balance)
                for row in self.rows
            ],
        )

    @torch.no_grad()
    def _read(self, step: int, one: ScaleVector) -> AmplificationRow:
        start = self._first.setdefault(one.name, one.balance.clone())
        flow = (start.square() + 4 * one.effective_squares).sqrt()
        columns = one.gain_squares, one.weight_squares, one.speeds, flow, one.balance
        return AmplificationRow(step, one.name, *(values.mean().item() for values in columns))


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
    >>> found, optimizer = amplification(model, x), torch.optim.SGD(model.parameters(), lr=0.01)
    >>> for step in range(201):
    ...     if step % 100 == 0:
    ...         _ = found.record(step)
    ...     (model(x) - 3 * x).square().sum(1).mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> first, _, last = found.curve("0.weight")
    >>> last.speed > 2 * first.speed, abs(last.speed / last.flow - 1) < 0.01
    (True, True)
    """
    inner = unwrap(model)
    return Amplification(inner, find_maps(inner, inputs))


def _change(first: float, last: float) -> str:
    return "–" if math.isnan(first + last) else f"{number(first)} → {number(last)}"
