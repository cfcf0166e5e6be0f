"""What every tensor of a hand-written transformer does: `th.dissect` on your own build function.

    python examples/dissect_my_model.py

Prints a table with one row for each kind of tensor. It takes a few seconds and no memory for weights.
"""

import torch
from torch import Tensor, nn

import theodolite as th

HEAD_DIM = 16


class Block(nn.Module):
    """One fused matrix makes queries, keys and values; the MLP is gated, gate and up fused too."""

    def __init__(self, width: int):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, 3, width // HEAD_DIM, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.ln2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Transformer(nn.Module):
    """Nothing here knows about Theodolite."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.positions = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.ln(self.blocks(x)))


if __name__ == "__main__":
    inputs = torch.zeros(2, 64, dtype=torch.long)
    anatomy = th.dissect(Transformer, inputs, size=th.Size(width=128, depth=6))
    print(anatomy)

    part = anatomy["blocks.0.qkv.weight"]
    print(f"\n{part.name}: {part.role}, fan-in {part.fan_in}, fan-out {part.fan_out}, row blocks {part.rows}")
