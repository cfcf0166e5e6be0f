"""An audit of muP that was written by hand: what is wrong with it, and the line that mends it.

    python examples/audit.py

A small GPT with muP in width and CompleteP in depth: multipliers in the network, groups in
`make_optimizer`. It has two mistakes on purpose: the groups are made by the number of dimensions, so that
the embeddings get the learning rate of hidden weights; and the number of heads is fixed, so that heads grow
with width, but their scale is 1/√d. Takes half a minute. The same from the command line:

    theodolite audit examples/audit.py:workload
"""

import torch
from torch import Tensor, nn

import theodolite as th

VOCAB, LENGTH, HEADS = 64, 16, 4
BASE = th.Size(width=32, depth=2)  # where your numbers are right


class Block(nn.Module):
    """Attention and an MLP, their results divided by the depth."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.scale = BASE.depth / depth

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches."""
        pieces = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (piece.unflatten(-1, (HEADS, -1)).transpose(1, 2) for piece in pieces)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1/√d
        x = x + self.scale * self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """A language model whose logits are multiplied by base width / width."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width, depth) for _ in range(depth)])
        self.ln_f, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, VOCAB, bias=False)
        self.growth = width / BASE.width
        for name, tensor in self.named_parameters():
            if tensor.ndim == 2:
                hidden = name.startswith("blocks")
                nn.init.normal_(tensor, std=0.1 / self.growth**0.5 if hidden else 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.ln_f(self.blocks(x))) / self.growth


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    """AdamW as you make it for training."""
    named = list(model.named_parameters())
    hidden = [tensor for name, tensor in named if tensor.ndim == 2 and name != "head.weight"]
    others = [tensor for name, tensor in named if tensor.ndim == 1 or name == "head.weight"]
    wider, deeper = model.growth, len(model.blocks) / BASE.depth
    return torch.optim.AdamW(
        [
            {"params": hidden, "lr": 1e-2 / wider, "weight_decay": 0.1 * wider},
            {"params": others, "lr": 1e-2, "weight_decay": 0.0},
        ],
        lr=1e-2,  # what a sweep of `own` puts another number in place of
        eps=1e-8 / (wider * deeper),
    )


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from the seed and the step alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    start = torch.randint(VOCAB, (4, 1), generator=generator)
    stride = torch.randint(1, 8, (4, 1), generator=generator)
    counted = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return counted[:, :-1], counted[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


workload = th.Workload("my-gpt", GPT, batch, loss, BASE, optimizer=make_optimizer)

if __name__ == "__main__":
    print(th.audit(workload))
