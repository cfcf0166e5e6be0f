"""Networks with microsoft/mup: its readout, base shapes and optimizers, as its README says to use them.

Runs in the peers' environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mup import MuAdam, MuAdamW, MuReadout, MuSGD, MuSharedReadout, set_base_shapes
from torch import Tensor, nn
from torch.nn import functional

from theodolite import Size, Workload

BASE, DELTA = 32, 48
"""The width of the base model, and of another, by which mup knows which dimensions are widths."""
HEADS, VOCAB, CONTEXT = 4, 16, 8


class MLP(nn.Module):
    def __init__(self, width: int, depth: int, readout: type[nn.Linear]) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.readout = readout(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return self.readout(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        d = width // HEADS
        heads = (one.view(b, t, HEADS, d).transpose(1, 2) for one in self.qkv(self.norm_1(x)).chunk(3, -1))
        # 8/d instead of 1/√d, as mup says for its transformer.
        y = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=8 / d)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(self.up(self.norm_2(x)).relu())


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, readout: type[nn.Linear], *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        if tied:
            self.readout = MuSharedReadout(self.tokens.weight, bias=False)
        else:
            self.readout = readout(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


def mlp(readout: type[nn.Linear] = MuReadout) -> Workload:
    """An MLP on rows of numbers."""

    def build(width: int, depth: int) -> nn.Module:
        return _with_shapes(lambda size: MLP(size, depth, readout), width)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        inputs = torch.randn(32, 8, generator=generator)
        return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long() + 2 * (inputs[:, 2] > 0).long()

    return Workload("mup's MLP", build, batch, functional.cross_entropy, Size(64, 2))


def transformer(readout: type[nn.Linear] = MuReadout, *, tied: bool = False) -> Workload:
    """A Transformer, on tokens of which the next follows from the last two."""

    def build(width: int, depth: int) -> nn.Module:
        return _with_shapes(lambda size: Transformer(size, depth, readout, tied=tied), width)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=generator)
        for at in range(2, CONTEXT + 1):
            tokens[:, at] = (tokens[:, at - 1] + 3 * tokens[:, at - 2] + 1) % VOCAB
        return tokens[:, :-1], tokens[:, 1:]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload("mup's Transformer", build, batch, loss, Size(64, 2))


def _with_shapes(build: Callable[[int], nn.Module], width: int) -> nn.Module:
    model = build(width)
    plain = not any(isinstance(module, MuReadout) for module in model.modules())
    # mup refuses a readout that is not its own, unless told otherwise.
    return set_base_shapes(model, build(BASE), delta=build(DELTA), do_assert=not plain)


def _made(kind: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **options)


mu_adamw = _made(MuAdamW, lr=1e-2, weight_decay=0.1)
mu_adam = _made(MuAdam, lr=1e-2)
mu_sgd = _made(MuSGD, lr=1e-1)
adamw = _made(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = _made(torch.optim.SGD, lr=1e-1)
