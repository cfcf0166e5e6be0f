"""What is read beside the rules: the sizes of gradients, as far as they say something of later steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Adam

from theodolite.core.size import Size
from theodolite.surveying.auditing.reading import gradient_sizes


class Gated(nn.Module):
    """A weight behind a gate and a head that start at zero, and one behind the head alone."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.head = nn.Parameter(torch.zeros(width)), nn.Linear(width, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.gate * self.inner(x).tanh())


def test_a_gradient_that_is_zero_at_two_steps_says_nothing_of_later_ones(rows):
    def make(model):
        return Adam(model.parameters(), lr=1e-3)

    found = gradient_sizes(rows(Gated), make, Size(32, 1), seed=0, steps=4)
    # The head has one at once, the gate and the first layer at the second step, the inner one at the third.
    assert set(found) == {"head.weight", "gate", "first.weight"}
    assert set(gradient_sizes(rows(Gated), make, Size(32, 1), seed=0, steps=1)) == {"head.weight"}
