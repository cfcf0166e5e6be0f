"""A network with a tensor of every role, inside of the branches and outside."""

import torch
from torch import nn

from theodolite import Size, plan

INPUTS = torch.zeros(2, 8)
BASE, TARGET = Size(16, 2), Size(128, 6)


class Zoo(nn.Module):
    """Blocks of three branches: two layers with a gate that does not grow, one layer, and a norm behind."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_in = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gate = nn.Linear(width, 1)
        self.single = nn.Linear(width, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.mix_back = nn.Linear(width, width, bias=False)
        self.norm_out = nn.LayerNorm(width)

    def forward(self, x):
        normed = self.norm_in(x)
        x = x + self.down(self.up(normed).relu()) * self.gate(normed).sigmoid()
        x = x + self.single(x).relu()
        return x + self.norm_out(self.mix_back(self.mix(x).relu()))


def zoo_plan(size=TARGET, base=BASE, **options):
    """A plan for the zoo; the same object for the same options, as plans are not changed."""
    options = {"lr": 2**-6, "weight_decay": 0.1} | options
    key = (size, base, repr(sorted(options.items(), key=str)))
    if key not in _PLANS:
        _PLANS[key] = plan(Zoo, INPUTS, size=size, base=base, **options)
    return _PLANS[key]


_PLANS = {}
