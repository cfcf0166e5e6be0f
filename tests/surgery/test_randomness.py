"""Random numbers of a forward pass are the same before an edit and after, or the error says why not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite.surgery import SurgeryError, fold, insert_block

from .networks import Branch

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Noisy(Branch):
    """A branch that is dropped out in eval mode too, by one of several generators."""

    def __init__(self, width: int, draws: str, generator: torch.Generator | None = None) -> None:
        super().__init__(width)
        self.draws, self.generator = draws, generator

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        inside = torch.tanh(self.up(self.norm(x)))
        if self.draws == "dropout":
            inside = nn.functional.dropout(inside, 0.3)  # training is True where nothing is said
        elif self.draws == "numpy":
            inside = inside * np.random.rand()
        elif self.draws == "python":
            inside = inside * random.random()
        elif self.draws == "path":
            return x + (torch.rand(len(x), 1) < 0.7) * self.down(inside)
        elif self.generator is not None:
            inside = inside * torch.rand(inside.shape, generator=self.generator)
        return x + self.down(inside)


class Drawing(nn.Module):
    """Blocks in a list, and random numbers in or between them."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5) if draws == "generator" else None
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Noisy(8, draws, generator) for _ in range(3))
        self.draws, self.calls = draws, 0

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x = self.first(x)
        if self.draws == "input":
            x = x + torch.randn_like(x)
        gates = torch.rand(len(self.blocks)) if self.draws == "by number" else torch.ones(len(self.blocks))
        self.calls += self.draws == "counter"
        for gate, block in zip(gates, self.blocks, strict=True):
            x = block(x * gate if gate < 0.5 else x)
            x = x + torch.randn_like(x) if self.draws == "between" else x
        return self.last(x) + self.calls


@pytest.mark.parametrize("draws", ["dropout", "path", "numpy", "python", "generator", "input"])
@pytest.mark.parametrize("at", [0, 2])
def test_random_numbers_of_the_others_stay_theirs(draws: str, at: int) -> None:
    torch.manual_seed(0)
    model = Drawing(draws).train()
    x, states = torch.randn(5, 4), [torch.get_rng_state(), random.getstate()]
    generator = model.blocks[2].generator
    held = None if generator is None else generator.get_state()
    _, proof = insert_block(model, x, at)
    assert (proof.outputs, proof.gradients) == (0.0, 0.0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert held is None or torch.equal(generator.get_state(), held)


@pytest.mark.parametrize(
    ("draws", "reason"),
    [
        ("by number", "draws random numbers in its forward pass, and others with one block more"),
        ("between", "draws random numbers in its forward pass, and others with one block more"),
        ("counter", "two passes of the network as it is differ"),
    ],
)
def test_noise_that_cannot_be_told_from_an_edit_is_named(draws: str, reason: str) -> None:
    model = Drawing(draws).train()
    with pytest.raises(SurgeryError, match=reason):
        insert_block(model, torch.randn(5, 4), 1)
    assert len(model.blocks) == 3


def test_a_proof_of_another_edit_names_the_noise_too() -> None:
    with pytest.raises(SurgeryError, match="fold cannot be proved: two passes of the network"):
        fold(Drawing("counter"), torch.randn(5, 4))
    _, proof = fold(Drawing("dropout"), torch.randn(5, 4))
    assert proof.outputs < 1e-5
