"""Encoders of text, and an encoder with a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss
from .pieces import HEAD, LENGTH, VOCABULARY, WIDE, RMSNorm, draw_small, joined, split, text


class PostNormBlock(nn.Module):
    """`norm(x + f(x))`, for attention over all positions and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.intermediate = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.out_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        q, k, v = (split(each(x), self.heads) for each in (self.query, self.key, self.value))
        x = self.attention_norm(x + self.attention_out(joined(F.scaled_dot_product_attention(q, k, v))))
        return self.out_norm(x + self.out(F.gelu(self.intermediate(x))))


class BERT(nn.Module):
    """Three embeddings and a norm, blocks, and a head of two layers: the second is the embedding."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(PostNormBlock(width) for _ in range(depth))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.words.weight
        draw_small(self.parameters())
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(places) + self.kinds(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


class RelativeAttention(nn.Module):
    """Attention whose scores have no scale and get a bias; of other tokens, where there are any."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.q.weight, std=(width * HEAD) ** -0.5)

    def forward(self, x: Tensor, others: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend."""
        q, k, v = (
            split(self.q(x), self.heads),
            split(self.k(others), self.heads),
            split(self.v(others), self.heads),
        )
        scores = q @ k.transpose(-1, -2)
        return self.o(joined((scores if bias is None else scores + bias).softmax(-1) @ v))


class Layer(nn.Module):
    """Attention to the tokens themselves, in a decoder to those of the encoder too, and an MLP."""

    def __init__(self, width: int, *, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(3 if decodes else 2))
        self.own = RelativeAttention(width)
        self.cross = RelativeAttention(width) if decodes else None
        self.wi = nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Two or three residual branches."""
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, bias)
        if self.cross is not None and encoded is not None:
            x = x + self.cross(self.norms[1](x), encoded)
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class T5(nn.Module):
    """One embedding for encoder, decoder and head; each stack has a bias for every distance and head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder_bias = nn.Embedding(2 * LENGTH, width // HEAD)
        self.decoder_bias = nn.Embedding(2 * LENGTH, width // HEAD)
        self.encoder = nn.ModuleList(Layer(width, decodes=False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(width, decodes=True) for _ in range(depth))
        self.encoder_norm = RMSNorm(width)
        self.decoder_norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target; with a tied head the stream is divided by √width before it."""
        x = self.shared(source)
        for layer in self.encoder:
            x = layer(x, _relative(self.encoder_bias, source.shape[1]))
        encoded = self.encoder_norm(x)
        mask = torch.full((target.shape[1], target.shape[1]), -1e9, device=target.device).triu(1)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, _relative(self.decoder_bias, target.shape[1]) + mask, encoded)
        return self.head(self.decoder_norm(x) * x.shape[-1] ** -0.5)


def _relative(table: nn.Embedding, length: int) -> Tensor:
    """By head, query and key, the bias of their distance."""
    places = torch.arange(length, device=table.weight.device)
    return table(places[None] - places[:, None] + LENGTH).permute(2, 0, 1)


def masked(seed: int) -> tuple[Tensor, Tensor]:
    """Some tokens are replaced by the first; all are to be told."""
    ids, _ = text(seed)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.25
    return ids.masked_fill(hidden, 0), ids


def translated(seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The source in reverse is the target."""
    ids, following = text(seed)
    return (following.flip(1), ids), following


EXHIBITS = [
    Exhibit(
        name="BERT",
        build=BERT,
        batch=masked,
        loss=next_token_loss,
        roles={
            "words.weight": "input",
            "positions.weight": "input",
            "kinds.weight": "input",
            "*.bias": "bias",
            "*norm.weight": "gain",
            "transform.weight": "hidden",
            "layers.*": "hidden",
        },
        branches=4,
        shows="norms after the sums, a tied head with a bias and a layer of its own",
        widths=WIDE,
    ),
    Exhibit(
        name="T5",
        build=T5,
        batch=translated,
        loss=next_token_loss,
        roles={
            "shared.weight": "input",
            "*coder_bias.weight": "input",
            "*norm*": "gain",
            "encoder.*": "hidden",
            "decoder.*": "hidden",
        },
        branches=10,
        shows="encoder and decoder, biases by distance, √width before a tied head",
        widths=WIDE,
        depths=(2, 4, 8, 16),
    ),
]
