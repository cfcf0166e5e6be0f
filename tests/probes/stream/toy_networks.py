"""Small networks for tests of the stream: gates of zero, and blocks that a time multiplies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.workloads import Workload, next_token_loss

from ...gallery.diffusion import CHANNELS, SIDE, DiT


def noisy_images(seed: int, step: int, num: int = 16) -> Batch:
    """Smooth images between data (t = 0) and noise (t = 1); the target is the direction between them."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    coarse = torch.randn(num, CHANNELS, 2, 2, generator=generator)
    images = F.interpolate(coarse, scale_factor=SIDE / 2, mode="bilinear", align_corners=False)
    noise = torch.randn(images.shape, generator=generator)
    t = torch.rand(num, generator=generator)
    mixed = images + t[:, None, None, None] * (noise - images)
    return (mixed, t), noise - images


DIFFUSION = Workload("diffusion", DiT, noisy_images, F.mse_loss, Size(32, 2))
"""adaLN-Zero: the gates of all branches and the readout start at zero."""


def zero_readout(width: int, depth: int) -> nn.Module:
    """A GPT whose branches have no gradient until its readout has moved."""
    model = GPT(width, depth, vocab=32, context=8, head_dim=16)
    nn.init.zeros_(model.readout.weight)
    return model


def counting(seed: int, step: int) -> Batch:
    """Sequences that count upwards from a random token."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = (torch.randint(32, (8, 1), generator=generator) + torch.arange(9)) % 32
    return tokens[:, :-1], tokens[:, 1:]


COUNTING = Workload("counting", zero_readout, counting, next_token_loss, Size(32, 2))


class Amplifier(nn.Module):
    """`h ← h + g(t) W h` with W = I: after L blocks the stream is exactly `(1 + g)^L` times its start.

    So is its gradient on the way back. `g(t) = rate·t + floor`.
    """

    def __init__(self, width: int, depth: int, rate: float = 1.0, floor: float = 0.0) -> None:
        super().__init__()
        self.rate, self.floor = rate, floor
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 1, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        for block in self.blocks:
            nn.init.eye_(block.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """A number for each example."""
        gate = (self.rate * t + self.floor)[:, None]
        h = self.enter(x)
        for block in self.blocks:
            h = h + gate * block(h)
        return self.leave(h)


def timed_rows(seed: int, step: int, num: int = 24) -> Batch:
    """Rows of four numbers with a time from 0 to 1."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    x = torch.randn(num, 4, generator=generator)
    return (x, torch.rand(num, generator=generator)), x.sum(1, keepdim=True)
