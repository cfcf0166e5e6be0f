"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss
from .pieces import SMALL, WIDE, Attention, Decoder, PreNorm, SwiGLU, draw_small, text

EXPERTS, CHOSEN = 4, 2


class Mixture(nn.Module):
    """Every token goes to two of four experts; all are computed, and most are multiplied by zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        draw_small(self.router.parameters(), SMALL)
        self.experts = nn.ModuleList(SwiGLU(width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the experts' outputs, weighted by a softmax over the chosen ones."""
        scores, chosen = self.router(x).topk(CHOSEN, dim=-1)
        weights = torch.zeros(*x.shape[:-1], EXPERTS, device=x.device).scatter(-1, chosen, scores.softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (weights.unsqueeze(-1) * outputs).sum(-2)


class SharedMixture(nn.Module):
    """One expert sees every token; the others are three tensors, chosen by a sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        draw_small(self.router.parameters(), SMALL)
        self.shared = SwiGLU(width)
        self.gate = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / (3 * width) ** 0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / (3 * width) ** 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (6 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The shared expert, and the chosen ones."""
        scores = self.router(x).sigmoid()
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(CHOSEN, dim=-1).indices, 1.0)
        weights = scores * chosen
        hidden = F.silu(torch.einsum("bti,eij->btej", x, self.gate)) * torch.einsum(
            "bti,eij->btej", x, self.up
        )
        return self.shared(x) + torch.einsum("btej,eji,bte->bti", hidden, self.down, weights)


def mixtral(width: int, depth: int) -> nn.Module:
    """Attention and a mixture."""
    return Decoder(width, depth, lambda w: PreNorm(w, Attention(w), Mixture(w)))


def shared(width: int, depth: int) -> nn.Module:
    """Attention and a mixture with a shared expert."""
    return Decoder(width, depth, lambda w: PreNorm(w, Attention(w), SharedMixture(w)))


ROLES = {
    "embed.weight": "input",
    "head.weight": "output",
    "*norm*": "gain",
    "*.router.weight": "output",
    "blocks.*": "hidden",
}

EXHIBITS = [
    Exhibit(
        name="Mixtral",
        build=mixtral,
        batch=text,
        loss=next_token_loss,
        roles=ROLES,
        branches=4,
        shows="two of four experts for each token, by a softmax",
        widths=WIDE,
    ),
    Exhibit(
        name="DeepSeek experts",
        build=shared,
        batch=text,
        loss=next_token_loss,
        roles=ROLES,
        branches=4,
        shows="a shared expert, the others in three tensors, chosen by a sigmoid",
        widths=WIDE,
    ),
]
