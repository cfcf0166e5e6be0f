"""Language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss, tokens

VOCABULARY, LENGTH, HEAD = 64, 16, 8


class NanoAttention(nn.Module):
    """Causal attention with one fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, HEAD).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class NanoBlock(nn.Module):
    """Attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = NanoAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """GPT-2: learned positions, a head that is the embedding; returns logits and no loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(NanoBlock(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                ends = name.endswith(("c_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        """Logits, and the loss that was not asked for."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)), None


EXHIBITS = [
    Exhibit(
        name="nanoGPT",
        build=NanoGPT,
        batch=tokens(VOCABULARY, LENGTH),
        loss=lambda output, targets: next_token_loss(output[0], targets),
        roles={
            "wte.weight": "input",
            "wpe.weight": "input",
            "*ln_*.weight": "gain",
            "*.bias": "bias",
            "h.*": "hidden",
        },
        branches=4,
        widths=(64, 256, 1024),
        lr=2**-9,
        shows="tied head, learned positions, returns (logits, loss)",
    ),
]
