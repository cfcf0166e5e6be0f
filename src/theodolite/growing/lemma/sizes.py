"""How large the values of a recorded forward pass are, over all units that were looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from theodolite.anatomy.structure.flow import Flow
from theodolite.probes.scaling.spectral_norm import spectral_norm

ROUNDING = 1e-5
"""More than what float32 loses in a spectral norm."""
MATRIX_VIEWS = frozenset(
    {"t", "transpose", "mT", "permute", "detach", "alias", "clone", "contiguous", "_to_copy"}
)
"""A parameter seen through one of them is the same matrix or its transpose."""


@dataclass
class Sizes:
    """How large the values of a recorded pass were, over all units looked at.

    Without passes every size is 1, and only what was asked for is noted: a first walk finds what to keep.
    """

    flow: Flow
    parameters: Mapping[str, Tensor]
    anywhere: bool = False
    """Are norms bounded for all inputs, by their ε alone?"""
    passes: list[Mapping[int, Tensor]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def largest(self, value: int) -> float:
        """max|x|."""
        return self._most(value, lambda x: float(x.abs().max()))

    def inverse(self, value: int) -> float:
        """1/min|x|."""
        return self._most(value, lambda x: inverse(float(x.abs().min())))

    def spectral(self, value: int) -> float:
        """The largest singular value of a matrix, or of any of a stack."""
        return self._most(value, spectral)

    def most(self, value: int, measure: Callable[[Tensor], float]) -> float:
        """The largest that a measure is of it."""
        return self._most(value, measure)

    def held(self, value: int) -> Tensor | None:
        """A parameter, or what a pass kept of a constant."""
        name = self.flow.graph.parameters.get(value)
        if name is not None:
            return self.parameters[name].detach()
        self.asked.add(value)
        return self.passes[0].get(value) if self.passes else None

    def _most(self, value: int, measure: Callable[[Tensor], float]) -> float:
        name = self._parameter(value)
        if name is not None:
            return measure(self.parameters[name].detach())
        self.asked.add(value)
        found = [measure(one[value]) if value in one else math.nan for one in self.passes]
        return 1.0 if not found else math.nan if any(map(math.isnan, found)) else max(found)

    def _parameter(self, value: int) -> str | None:
        """The parameter that a value shows, as it is or transposed."""
        graph = self.flow.graph
        shape = sorted(graph.shapes[value])
        while value not in graph.parameters:
            node = self.flow.maker(value)
            if node is None or node.op not in MATRIX_VIEWS:
                return None
            value = node.inputs[0]
        return graph.parameters[value] if len(shape) < 3 and sorted(graph.shapes[value]) == shape else None


def spectral(matrices: Tensor) -> float:
    """The largest singular value of a matrix, or of any of a stack, rounded up.

    >>> import torch
    >>> round(spectral(torch.stack([torch.eye(3), 2 * torch.eye(3)])), 3)
    2.0
    """
    found = spectral_norm(matrices, rtol=1e-3)
    return float((found.value + found.uncertainty).max()) * (1 + ROUNDING)


def inverse(number: float) -> float:
    """1/x, which is inf at 0."""
    return 1 / number if number else math.inf
