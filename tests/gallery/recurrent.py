"""Recurrent networks, and stacks of layers that are no residual branches of two layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss
from .pieces import VOCABULARY, WIDE, Decoder, RMSNorm, SwiGLU, text

STREAMS = 4


class Recurrent(nn.Module):
    """An embedding, torch's recurrent layers, a head."""

    def __init__(self, width: int, layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = layers
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.layers(self.embed(ids))[0])


def lstm(width: int, depth: int) -> nn.Module:
    """Layers of `nn.LSTM`."""
    return Recurrent(width, nn.LSTM(width, width, depth, batch_first=True))


def gru(width: int, depth: int) -> nn.Module:
    """Layers of `nn.GRU`."""
    return Recurrent(width, nn.GRU(width, width, depth, batch_first=True))


class Elman(nn.Module):
    """`h = tanh(W x + U h + b)`, as a loop."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.U = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All states, and the last."""
        state = torch.zeros_like(x[:, 0])
        states = []
        for place in range(x.shape[1]):
            state = torch.tanh(x[:, place] @ self.W + state @ self.U + self.b)
            states.append(state)
        return torch.stack(states, dim=1), state


def elman(width: int, depth: int) -> nn.Module:
    """One layer, whatever the depth."""
    return Recurrent(width, Elman(width))


class Stack(nn.Module):
    """An input layer, `depth` layers and a readout, of vectors."""

    def __init__(self, width: int, depth: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TanhLayer(nn.Module):
    """`tanh(W x + b)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return torch.tanh(self.linear(x))


def plain(width: int, depth: int) -> nn.Module:
    """Layers without a skip path."""
    return Stack(width, depth, TanhLayer)


class HighwayLayer(nn.Module):
    """`T(x)·H(x) + (1 − T(x))·x`: as much as the gate lets in, it takes out, so that nothing adds up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        gate = self.gate(x).sigmoid()
        return gate * torch.tanh(self.transform(x)) + (1 - gate) * x


def highway(width: int, depth: int) -> nn.Module:
    """Layers that carry a gated part of what they get."""
    return Stack(width, depth, HighwayLayer)


class ReminderLayer(nn.Module):
    """`λ₀ x + λ₁ x₀`, then a branch; x₀ is what the first layer got."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.norm = RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """What is added of x₀ passes no weight: it is no branch, and λ acts on the stream."""
        x = self.lambdas[0] * x + self.lambdas[1] * first
        return x + self.mlp(self.norm(x))


class Reminded(Stack):
    """Every layer mixes in what the first one got."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth, ReminderLayer)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = first = torch.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x, first)
        return self.head(x)


class HyperBlock(nn.Module):
    """Several streams: a branch reads a learned mixture of them and is added to each; they are mixed too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.full((STREAMS,), 1 / STREAMS))
        self.write = nn.Parameter(torch.ones(STREAMS))
        self.mix = nn.Parameter(torch.eye(STREAMS))
        self.norm = RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, streams: Tensor) -> Tensor:
        """One branch."""
        x = torch.einsum("...nw,n->...w", streams, self.read)
        y = self.mlp(self.norm(x))
        return torch.einsum("...nw,nm->...mw", streams, self.mix) + y.unsqueeze(-2) * self.write.unsqueeze(-1)


class HyperConnected(Decoder):
    """All streams start as the embedding; the head reads their mean."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth, HyperBlock)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        streams = self.embed(ids).unsqueeze(-2).expand(-1, -1, STREAMS, -1)
        for block in self.blocks:
            streams = block(streams)
        return self.head(self.norm(streams.mean(-2)))


def clusters(seed: int) -> tuple[Tensor, Tensor]:
    """Vectors in four classes: the largest of their first four numbers."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :4].argmax(1)


CELLS = {"embed.weight": "input", "head.weight": "output", "*bias*": "bias", "layers.weight*": "hidden"}
LAYERS = {"first.weight": "input", "head.weight": "output", "*.bias": "bias", "layers.*": "hidden"}

EXHIBITS = [
    Exhibit(
        name="LSTM",
        build=lstm,
        batch=text,
        loss=next_token_loss,
        roles=CELLS,
        branches=0,
        shows="nn.LSTM in two layers",
        widths=WIDE,
        depths=(),
    ),
    Exhibit(
        name="GRU",
        build=gru,
        batch=text,
        loss=next_token_loss,
        roles=CELLS,
        branches=0,
        shows="nn.GRU in two layers",
        widths=WIDE,
        cheap=True,
        depths=(),
    ),
    Exhibit(
        name="Elman network",
        build=elman,
        batch=text,
        loss=next_token_loss,
        roles={
            "embed.weight": "input",
            "head.weight": "output",
            "head.bias": "bias",
            "layers.b": "bias",
            "layers.[WU]": "hidden",
        },
        branches=0,
        shows="a recurrence written out, parameters without modules",
        widths=WIDE,
        depths=(),
    ),
    Exhibit(
        name="Linear–Tanh stack",
        build=plain,
        batch=clusters,
        loss=F.cross_entropy,
        roles=LAYERS,
        branches=0,
        shows="depth without branches",
        widths=WIDE,
        cheap=True,
    ),
    Exhibit(
        name="Highway network",
        build=highway,
        batch=clusters,
        loss=F.cross_entropy,
        roles=LAYERS,
        branches=0,
        shows="a gate that takes out of the skip path what it lets in",
        widths=WIDE,
        depths=(),
    ),
    Exhibit(
        name="Reminders of the input",
        build=Reminded,
        batch=clusters,
        loss=F.cross_entropy,
        roles={"*.lambdas": "gain", "*.norm.weight": "gain", **LAYERS},
        branches=2,
        shows="λ₀x + λ₁x₀ + f(x)",
        widths=WIDE,
        depths=(4, 8, 16),
    ),
    Exhibit(
        name="Hyper-connections",
        build=HyperConnected,
        batch=text,
        loss=next_token_loss,
        roles={
            "embed.weight": "input",
            "head.weight": "output",
            "*norm*": "gain",
            "*.read": "gain",
            "*.write": "gain",
            "*.mix": "gain",
            "blocks.*": "hidden",
        },
        branches=2,
        shows="four streams, mixed by learned numbers",
        widths=WIDE,
        hints={"*.read": "gain", "*.mix": "gain"},
    ),
]
