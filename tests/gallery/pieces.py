"""What several networks of the gallery are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, HEAD = 16, 8, 8
WIDE = (64, 256, 512)
"""Below, what is random at the start moves the output as much as learning does: it goes as 1/√width."""


SMALL = 0.006
"""The std of what reads the stream into few numbers. Its random start, which fades as 1/√width, is then small
beside what it learns in three steps."""


def text(seed: int) -> tuple[Tensor, Tensor]:
    """Four sequences in which every token is followed by the fifth after it, and the next tokens.

    All batches teach the same, so that few steps and small widths show what training does in the long run and
    the limit of width.
    """
    start = torch.randint(VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class RMSNorm(nn.Module):
    """Written out: `γ · x / rms(x)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Decoder(nn.Module):
    """An embedding, `depth` blocks, a norm and a head."""

    def __init__(
        self,
        width: int,
        depth: int,
        block: Callable[[int], nn.Module],
        norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.norm = norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PreNorm(nn.Module):
    """`x + f(norm(x))` for each f in turn."""

    def __init__(self, width: int, *branches: nn.Module, norm: Callable[[int], nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(width) for _ in branches)
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """One residual branch after the other."""
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return x


class Attention(nn.Module):
    """Causal attention with rotary positions; queries in groups share a key, if there are fewer keys."""

    def __init__(self, width: int, keys: int | None = None) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.keys = keys or self.heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, self.keys * HEAD, bias=False)
        self.v = nn.Linear(width, self.keys * HEAD, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        if keys is not None:
            draw_small((self.k.weight, self.v.weight), SMALL)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.keys), split(self.v(x), self.keys)
        k, v = (each.repeat_interleave(self.heads // self.keys, dim=1) for each in (rotated(k), v))
        return self.o(joined(F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)))


class SwiGLU(nn.Module):
    """`W₂ (silu(W₁ x) · W₃ x)`."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 2 * width
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · d) → (batch, heads, length, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The way back."""
    return x.transpose(1, 2).flatten(-2)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features are rotated by an angle that goes with the position."""
    length, features = x.shape[-2:]
    rates = 100.0 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1
    )


def draw_small(parameters: Iterable[nn.Parameter], std: float = 0.02) -> None:
    """Draw matrices from a normal distribution, as GPT-2 does."""
    for parameter in parameters:
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
