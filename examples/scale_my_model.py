"""Train a GPT four times as wide and three times as deep with the hyperparameters of the small one.

    python examples/scale_my_model.py

The model is written as in nanoGPT: queries, keys and values in one matrix, embedding and readout tied,
projections that start at 0.02/√(2L). Nothing in it knows of the plan.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import theodolite as th

VOCAB, CONTEXT, HEAD_DIM = 256, 64, 16


class Block(nn.Module):
    """Attention, then a multilayer perceptron, a norm before each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both branches to the stream."""
        batch, length, width = x.shape
        qkv = self.c_attn(self.ln_1(x)).split(width, dim=-1)
        q, k, v = (t.view(batch, length, -1, HEAD_DIM).transpose(1, 2) for t in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, tensor in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(tensor, std=0.02 / (2 * depth) ** 0.5)
            elif tensor.ndim == 2:
                nn.init.normal_(tensor, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(tensor)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every position."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def main(steps: int = 20) -> None:
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    plan = th.plan(
        GPT,
        tokens,
        size=th.Size(width=128, depth=6),
        base=th.Size(width=32, depth=2),  # where the next two lines were tuned
        lr=2**-6,
        weight_decay=0.1,
        options={"betas": (0.9, 0.95)},
    )
    print(plan)

    model = plan.build(seed=0)
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer, "cosine", steps=steps, warmup=4)
    text = th.data.state_of_the_union()
    for step in range(steps):
        inputs, targets = th.data.draw_text(text, num=4, length=CONTEXT, seed=0, step=step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step in (0, steps - 1):
            print(f"\nstep {step}: loss {loss.item():.1f}", end="")
    print()


if __name__ == "__main__":
    main()
