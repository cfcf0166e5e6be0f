"""A survey of your own model: say what is trained, once, in a file.

    theodolite survey examples/survey_my_model.py:workload

Prints the findings and writes survey.html and survey.json. This model has four flaws on purpose: the
initialisation of what ends a branch counts depth, the number of heads is fixed, so that heads grow with
width, the head is tied to the embedding, and one branch of each block has no norm.
The same from Python:

    python examples/survey_my_model.py
"""

import torch
from torch import Tensor, nn

import theodolite as th

VOCAB, LENGTH, HEADS = 64, 16, 4


class Block(nn.Module):
    """Attention behind a norm, an MLP without one."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for last in (self.proj, self.down):
            nn.init.normal_(last.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches."""
        pieces = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (piece.unflatten(-1, (HEADS, -1)).transpose(1, 2) for piece in pieces)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """A language model with a tied head."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*[Block(width, depth) for _ in range(depth)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from the seed and the step alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    start = torch.randint(VOCAB, (4, 1), generator=generator)
    stride = torch.randint(1, 8, (4, 1), generator=generator)
    counted = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return counted[:, :-1], counted[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


workload = th.Workload("counting", Transformer, batch, loss, size=th.Size(width=64, depth=2))

if __name__ == "__main__":
    survey = th.survey(workload)
    print(survey)
    print(f"\nThe page is {survey.save('survey.html')}")
