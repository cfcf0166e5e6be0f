"""Gradients that are rounding alone are told from those that are merely small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite import Size, Workload
from theodolite.probes.scaling.small_gradients import only_rounding


class Marked(nn.Module):
    """Its forward pass reads what somebody wrote on a parameter, as the layers of microsoft/mup do."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 7)
        self.shift = nn.Parameter(torch.zeros(1))
        self.weak = nn.Parameter(torch.zeros(width))
        self.head.weight.divisor = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        divisor = self.head.weight.divisor
        assert divisor == 2.0
        # The same number on all logits changes no probability: its gradient is rounding alone.
        return self.head(self.first(x).tanh() / divisor + 1e-7 * self.weak) + self.shift


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def test_the_copy_in_float64_keeps_what_is_written_on_parameters() -> None:
    workload = Workload("marked", Marked, batch, nn.functional.cross_entropy, Size(16, 1))
    torch.manual_seed(0)
    model = Marked(16, 1)
    workload.evaluate(model, batch(0, 0)).backward()
    assert only_rounding(workload, model, batch(0, 0)) == {"shift"}
