"""Language models whose branches attend."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from .exhibit import Exhibit, next_token_loss
from .pieces import (
    HEAD,
    LENGTH,
    SMALL,
    VOCABULARY,
    WIDE,
    Attention,
    Decoder,
    PreNorm,
    SwiGLU,
    draw_small,
    joined,
    rotated,
    split,
    text,
)


class FusedAttention(nn.Module):
    """Causal attention with one fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (split(part, self.heads) for part in self.c_attn(x).split(x.shape[-1], dim=2))
        return self.c_proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class NanoBlock(nn.Module):
    """Attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = FusedAttention(width)
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
        draw_small(self.parameters())
        for name, parameter in self.named_parameters():
            if name.endswith(("c_proj.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        """Logits, and the loss that was not asked for."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)), None


def llama(width: int, depth: int) -> nn.Module:
    """RMSNorm, rotary positions, SwiGLU, half as many keys as queries."""
    return Decoder(width, depth, lambda w: PreNorm(w, Attention(w, w // HEAD // 2), SwiGLU(w)))


def llama_two_keys(width: int, depth: int) -> nn.Module:
    """The same with two keys at every width."""
    return Decoder(width, depth, lambda w: PreNorm(w, Attention(w, 2), SwiGLU(w)))


class CentredNorm(nn.Module):
    """`(1 + γ) · x / rms(x)`, with γ = 0 at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class PeriNorm(nn.Module):
    """`x + norm(f(norm(x)))` for attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(CentredNorm(width) for _ in range(4))
        self.attention = Attention(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        x = x + self.norms[1](self.attention(self.norms[0](x)))
        return x + self.norms[3](self.mlp(self.norms[2](x)))


class ScaledEmbedding(nn.Embedding):
    """Multiplied by √width, which is a buffer."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(number, width)
        self.register_buffer("root", torch.tensor(width**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and scale."""
        return super().forward(ids) * self.root


def gemma(width: int, depth: int) -> nn.Module:
    """Norms before and after each branch, and an embedding that is the head too."""
    model = Decoder(width, depth, PeriNorm, CentredNorm)
    model.embed = ScaledEmbedding(VOCABULARY, width)
    model.head.weight = model.embed.weight
    draw_small(model.parameters())
    nn.init.normal_(model.embed.weight, std=0.125)
    return model


class NormedAttention(nn.Module):
    """Queries and keys have length one before their gain; values are mixed with those of the token itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mix = nn.Parameter(torch.tensor([0.5, 0.5]))
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (split(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        v = self.mix[0] * v + self.mix[1] * split(own, self.heads)
        q, k = (rotated(F.rms_norm(each, (HEAD,))) for each in (q, k))
        return self.proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class SpeedrunBlock(nn.Module):
    """The stream is mixed with the embedding by two learned numbers, then there are two branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attention = NormedAttention(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, first: Tensor, own: Tensor) -> Tensor:
        """`λ₀ x + λ₁ x₀`, then attention and a squared ReLU."""
        x = self.lambdas[0] * x + self.lambdas[1] * first
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]), own)
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class Speedrun(nn.Module):
    """Norms without gains, values from an embedding, zeros at the ends of branches, capped logits."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.values = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(SpeedrunBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits between −15 and 15."""
        x = first = F.rms_norm(self.embed(ids), (self.embed.embedding_dim,))
        for block in self.blocks:
            x = block(x, first, self.values(ids))
        return 15 * torch.tanh(self.head(F.rms_norm(x, x.shape[-1:])) / 15)


class FlexibleAttention(Attention):
    """The same attention by `flex_attention`, with a score function for the causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""

        def causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.where(query >= key, score, -float("inf"))

        q, k, v = (split(each(x), self.heads) for each in (self.q, self.k, self.v))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return self.o(joined(flex_attention(rotated(q), rotated(k), v, score_mod=causal)))


def titan(width: int, depth: int) -> nn.Module:
    """A Llama whose attention is a higher-order operator."""
    return Decoder(width, depth, lambda w: PreNorm(w, FlexibleAttention(w), SwiGLU(w)))


class UnitNorm(nn.Module):
    """An RMSNorm made of `F.normalize` and √width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.root = width**0.5
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Length one, times √width."""
        return F.normalize(x, dim=-1) * self.g * self.root


def unit_norms(width: int, depth: int) -> nn.Module:
    """Every norm is `F.normalize(x) · g · √width`."""
    return Decoder(width, depth, lambda w: PreNorm(w, Attention(w), SwiGLU(w), norm=UnitNorm), norm=UnitNorm)


class ParallelBlock(nn.Module):
    """`x + (attention(norm(x)) + mlp(norm(x)))`: one norm for both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches, whichever sum is taken first."""
        normed = self.norm(x)
        return x + (self.attention(normed) + self.mlp(normed))


def gpt_j(width: int, depth: int) -> nn.Module:
    """Attention and MLP side by side."""
    return Decoder(width, depth, ParallelBlock, nn.LayerNorm)


class LatentAttention(nn.Module):
    """Keys and values come from one small vector; a rotary key of fixed size is common to all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.q_down = nn.Linear(width, width // 2, bias=False)
        self.q_norm = nn.RMSNorm(width // 2)
        self.q_up = nn.Linear(width // 2, 2 * width, bias=False)
        self.kv_down = nn.Linear(width, width // 4, bias=False)
        self.kv_norm = nn.RMSNorm(width // 4)
        self.kv_up = nn.Linear(width // 4, 2 * width, bias=False)
        self.k_rotary = nn.Linear(width, HEAD, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        draw_small(self.k_rotary.parameters(), SMALL)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, q_rotary = split(self.q_up(self.q_norm(self.q_down(x))), self.heads).chunk(2, dim=-1)
        k, v = split(self.kv_up(self.kv_norm(self.kv_down(x))), self.heads).chunk(2, dim=-1)
        k_rotary = rotated(self.k_rotary(x)).unsqueeze(1).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q, rotated(q_rotary)), -1), torch.cat((k, k_rotary), -1)
        return self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def latent(width: int, depth: int) -> nn.Module:
    """Latent attention and SwiGLU."""
    return Decoder(width, depth, lambda w: PreNorm(w, LatentAttention(w), SwiGLU(w)))


DECODER = {"embed.weight": "input", "head.weight": "output", "*norm*": "gain"}

EXHIBITS = [
    Exhibit(
        name="nanoGPT",
        build=NanoGPT,
        batch=text,
        loss=lambda output, targets: next_token_loss(output[0], targets),
        roles={
            "wte.weight": "input",
            "wpe.weight": "input",
            "*ln_*.weight": "gain",
            "*.bias": "bias",
            "h.*": "hidden",
        },
        branches=4,
        shows="tied head, learned positions, returns (logits, loss)",
        widths=WIDE,
    ),
    Exhibit(
        name="Llama",
        build=llama,
        batch=text,
        loss=next_token_loss,
        roles={**DECODER, "blocks.*": "hidden"},
        branches=4,
        shows="RMSNorm written out, rotary positions, SwiGLU, half as many keys as queries",
        widths=WIDE,
    ),
    Exhibit(
        name="Llama, two keys",
        build=llama_two_keys,
        batch=text,
        loss=next_token_loss,
        roles={**DECODER, "*.k.weight": "output", "*.v.weight": "output", "blocks.*": "hidden"},
        branches=4,
        shows="a fixed number of keys: their maps are readouts",
        widths=WIDE,
    ),
    Exhibit(
        name="Gemma",
        build=gemma,
        batch=text,
        loss=next_token_loss,
        roles={"embed.weight": "input", "*norm*": "gain", "blocks.*": "hidden"},
        branches=4,
        shows="√width in a buffer, zero-centred gains, norms before and after each branch",
        widths=WIDE,
        depths=(2, 8, 32),
    ),
    Exhibit(
        name="modded-nanoGPT",
        build=Speedrun,
        batch=text,
        loss=next_token_loss,
        roles={
            "embed.weight": "input",
            "values.weight": "input",
            "head.weight": "output",
            "*.lambdas": "gain",
            "*.mix": "gain",
            "blocks.*": "hidden",
        },
        branches=4,
        shows="λ₀x + λ₁x₀ on the skip path, normed queries and keys, embedded values, zeros, capped logits",
        widths=WIDE,
    ),
    Exhibit(
        name="torchtitan",
        build=titan,
        batch=text,
        loss=next_token_loss,
        roles={**DECODER, "blocks.*": "hidden"},
        branches=4,
        shows="FlexAttention, a higher-order operator",
        widths=WIDE,
    ),
    Exhibit(
        name="x-transformers",
        build=unit_norms,
        batch=text,
        loss=next_token_loss,
        roles={**DECODER, "blocks.*": "hidden"},
        branches=4,
        shows="norms made of F.normalize and √width",
        widths=WIDE,
    ),
    Exhibit(
        name="GPT-J",
        build=gpt_j,
        batch=text,
        loss=next_token_loss,
        roles={"*.bias": "bias", **DECODER, "blocks.*": "hidden"},
        branches=4,
        shows="attention and MLP side by side",
        widths=WIDE,
    ),
    Exhibit(
        name="DeepSeek attention",
        build=latent,
        batch=text,
        loss=next_token_loss,
        roles={**DECODER, "*.k_rotary.weight": "output", "blocks.*": "hidden"},
        branches=4,
        shows="keys and values from a latent vector, a rotary key of fixed size",
        widths=WIDE,
    ),
]
