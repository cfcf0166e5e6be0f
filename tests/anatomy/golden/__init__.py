"""Golden tables: what every tensor of well-known networks does, read off their source code.

Each table was written from the architecture (transformers' modeling files, torch.nn, or the classes
beside their tables) and never from what `dissect` printed. `d` is the width, `n` the number of layers; a
name in a branch is relative to that branch's prefix. A gain says who reads it (`read_by`: linear maps with
weights of their own, so an Input-Norm) or what it reaches instead (`reaches`: an Output-Norm).
`test_dissection_golden.py` checks the tables numerically too, with no help from `dissect`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoders import Encoder, bert, bert_build, t5, t5_build, torch_encoder
from .gpt import gpt2, gpt2_build, gpt2_four_heads, gpt_neox, gpt_neox_build
from .llama import QK_NORM_PER_HEAD, cohere, decoder_build, gemma2, llama, olmo2
from .resnet import PreActivationResNet, ResNet, preactivation, resnet
from .table import THREE_LAYERS, Golden
from .vision import convnext, convnext_build, vit, vit_build
from .vocabulary import EXPERTS, HEAD, VOCAB

__all__ = ["GOLDENS", "Golden"]


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def sequence() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


GOLDENS: dict[str, Golden] = {
    # Three layers here: a first, a last and one that is neither.
    "gpt2": Golden(gpt2_build, tokens, gpt2, size=THREE_LAYERS),
    "gpt2-four-heads": Golden(lambda d, n: gpt2_build(d, n, heads=4), tokens, gpt2_four_heads),
    "llama": Golden(decoder_build("Llama", tie_word_embeddings=False), tokens, llama, size=THREE_LAYERS),
    "llama-two-kv-heads": Golden(
        decoder_build("Llama", fixed_kv=2, tie_word_embeddings=False),
        lambda: {"input_ids": tokens()},
        lambda d, n: llama(d, n, kv=2),
    ),
    # Attention as matrix products and a softmax, experts in a loop over those that were chosen.
    "llama-eager": Golden(
        decoder_build("Llama", tie_word_embeddings=False, attn_implementation="eager"), tokens, llama
    ),
    "mixtral-eager": Golden(
        decoder_build(
            "Mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
            experts_implementation="eager",
        ),
        tokens,
        lambda d, n: llama(d, n, moe=True),
    ),
    "qwen3": Golden(
        decoder_build("Qwen3", tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, qk_norm=QK_NORM_PER_HEAD),
    ),
    "gemma2": Golden(
        decoder_build("Gemma2", query_pre_attn_scalar=64, tie_word_embeddings=True),
        tokens,
        gemma2,
        silent=-1.0,
    ),
    "olmo2": Golden(
        lambda d, n: decoder_build("Olmo2", fixed_kv=d // HEAD, tie_word_embeddings=False)(d, n),
        tokens,
        olmo2,
    ),
    "mixtral": Golden(
        decoder_build("Mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, moe=True),
    ),
    "qwen3-moe": Golden(
        decoder_build("Qwen3Moe", num_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=False),
        tokens,
        lambda d, n: llama(d, n, qk_norm=QK_NORM_PER_HEAD, moe=True),
    ),
    "gpt-neox": Golden(gpt_neox_build, tokens, gpt_neox),
    "cohere": Golden(
        decoder_build("Cohere", use_qk_norm=True, tie_word_embeddings=True),
        tokens,
        cohere,
        shared=("model.layers.*.input_layernorm.weight",),
    ),
    "vit": Golden(vit_build, image, vit),
    "bert": Golden(bert_build, tokens, bert, size=THREE_LAYERS),
    "t5": Golden(t5_build, lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :7]}, t5),
    "convnext": Golden(convnext_build, image, convnext),
    "resnet": Golden(ResNet, image, resnet),
    "resnet-preactivation": Golden(PreActivationResNet, image, preactivation),
    "torch-encoder-post": Golden(
        lambda d, n: Encoder(d, n, norm_first=False),
        sequence,
        lambda d, n: torch_encoder(d, n, norm_first=False),
    ),
    "torch-encoder-pre": Golden(
        lambda d, n: Encoder(d, n, norm_first=True),
        sequence,
        lambda d, n: torch_encoder(d, n, norm_first=True),
    ),
}
