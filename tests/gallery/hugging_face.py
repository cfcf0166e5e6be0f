"""Networks of the transformers library, from tiny configs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss
from .pieces import HEAD, LENGTH, VOCABULARY, WIDE, text


def gemma(width: int, depth: int) -> nn.Module:
    """Gemma 3, whose scaled embedding keeps √width in a buffer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            num_key_value_heads=width // HEAD,
            head_dim=HEAD,
            query_pre_attn_scalar=HEAD,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
            attn_implementation="eager",
        )
    )


def mamba2(width: int, depth: int) -> nn.Module:
    """Mamba 2, whose heads have one time constant each."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=depth,
            num_heads=2 * width // HEAD,
            head_dim=HEAD,
            state_size=4,
            n_groups=1,
            chunk_size=LENGTH,
            use_cache=False,
            pad_token_id=0,
        )
    )


def wav2vec2(width: int, depth: int) -> nn.Module:
    """wav2vec 2.0: a convolution gives positions, in a branch that does not repeat."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            intermediate_size=2 * width,
            conv_dim=(width // 2, width // 2),
            conv_stride=(4, 4),
            conv_kernel=(8, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=5,
            num_conv_pos_embedding_groups=4,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
        )
    )


def sound(seed: int) -> tuple[Tensor, Tensor]:
    """Four waves of one frequency each, and which of sixteen it is."""
    kinds = torch.randint(VOCABULARY, (4,), generator=torch.Generator().manual_seed(seed))
    return torch.sin(0.1 * (kinds[:, None] + 1) * torch.arange(128.0)), kinds


def _text_loss(output: Any, targets: Tensor) -> Tensor:
    return next_token_loss(output.logits, targets)


def _kind_loss(output: Any, kinds: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.mean(1), kinds)


FADES = (
    "at the base depth the stream is mostly the random sum of its branches, beside a small embedding. The "
    "sum fades as 1/√depth, as it should, and its change with it; the norm behind it is judged"
)

EXHIBITS = [
    Exhibit(
        name="Gemma 3 of transformers",
        build=gemma,
        batch=text,
        loss=_text_loss,
        roles={"model.embed_tokens.weight": "input", "*norm*": "gain", "model.layers.*": "hidden"},
        branches=4,
        shows="√width in the buffer of a scaled embedding, zero-centred gains, normed queries and keys",
        widths=WIDE,
        depths=(2, 8, 32),
        exceptions={"model.layers.-1": FADES},
    ),
    Exhibit(
        name="Mamba 2 of transformers",
        build=mamba2,
        batch=text,
        loss=_text_loss,
        roles={
            "backbone.embeddings.weight": "input",
            "*norm*": "gain",
            "*.bias": "bias",
            "*.dt_bias": "bias",
            "*.A_log": "gain",
            "*.D": "gain",
            "*.conv1d.weight": "input",
            "lm_head.weight": "output",
            "backbone.layers.*": "hidden",
        },
        branches=2,
        shows="time constants of heads, a depthwise convolution, one fused projection",
        widths=WIDE,
        depths=(2, 8, 32),
        exceptions={"backbone.layers.-1": FADES},
    ),
    Exhibit(
        name="wav2vec 2.0 of transformers",
        build=wav2vec2,
        batch=sound,
        loss=_kind_loss,
        roles={
            "*.bias": "bias",
            "*norm.weight": "gain",
            "lm_head.weight": "output",
            "*.pos_conv_embed.conv.parametrizations.weight.original0": "gain",
            "wav2vec2.feature_extractor.conv_layers.0.conv.weight": "input",
            "wav2vec2.masked_spec_embed": "unused",
            "wav2vec2.*": "hidden",
        },
        branches=5,
        shows="a branch that does not repeat, a convolution with weight norm",
        widths=(128, 256, 512),
    ),
]
