"""GPT-2 and GPT-NeoX: LayerNorm, biases everywhere, query, key and value in one map."""

from __future__ import annotations

from torch import nn

from theodolite.anatomy.part import AttentionHeads

from .table import Limb, Table
from .vocabulary import (
    HEAD,
    VOCAB,
    bias,
    conv1d,
    gain,
    heads_of_thirds,
    hidden,
    lookup,
    readout,
    softmax,
    thirds,
)

# GPT-2: pre-norm, Conv1D (in, out), fused QKV, learned positions, tied head.


def gpt2_build(width: int, depth: int, heads: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=width,
            n_layer=depth,
            n_head=heads or width // HEAD,
            n_positions=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gpt2(d: int, n: int, attention: AttentionHeads | None = None) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"transformer.h.{i}.",
                "pre",
                {
                    "ln_1.weight": gain(d, read_by="attn.c_attn.weight"),
                    "ln_1.bias": bias(d),
                    "attn.c_attn.weight": conv1d(d, 3 * d, rows=thirds(d)),
                    # The bias of a fused map is fused as the map is.
                    "attn.c_attn.bias": bias(3 * d, rows=thirds(d)),
                    "attn.c_proj.weight": conv1d(d, d),
                    "attn.c_proj.bias": bias(d),
                },
                ends=("attn.c_proj.weight", "attn.c_proj.bias"),
                attention=attention or softmax(),
            ),
            Limb(
                f"transformer.h.{i}.",
                "pre",
                {
                    "ln_2.weight": gain(d, read_by="mlp.c_fc.weight"),
                    "ln_2.bias": bias(d),
                    "mlp.c_fc.weight": conv1d(d, 4 * d),
                    "mlp.c_fc.bias": bias(4 * d),
                    "mlp.c_proj.weight": conv1d(4 * d, d),
                    "mlp.c_proj.bias": bias(d),
                },
                ends=("mlp.c_proj.weight", "mlp.c_proj.bias"),
            ),
        ]

    outside = {
        "transformer.wte.weight": lookup(VOCAB, d, tied=("lm_head.weight",)),
        "transformer.wpe.weight": lookup(32, d),
        # Its only reader is the tied head: folding γ into it would change the embedding.
        "transformer.ln_f.weight": gain(d, reaches="a tied head"),
        "transformer.ln_f.bias": bias(d),
    }
    return Table(outside, [block(i) for i in range(n)])


def gpt2_four_heads(d: int, n: int) -> Table:
    """Four heads at every width: their size grows, and the scale 1/√(d/4) with it."""
    return gpt2(d, n, AttentionHeads(d // 4, True, (d // 4) ** -0.5, (d // 2) ** -0.5))


# GPT-NeoX: x + attention(N₁x) + mlp(N₂x), fused QKV interleaved by head, untied head.


def gpt_neox_build(width: int, depth: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // HEAD,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gpt_neox(d: int, n: int) -> Table:
    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"gpt_neox.layers.{i}.",
                "pre",
                {
                    "input_layernorm.weight": gain(d, read_by="attention.query_key_value.weight"),
                    "input_layernorm.bias": bias(d),
                    "attention.query_key_value.weight": hidden(d, 3 * d, rows=heads_of_thirds(d)),
                    "attention.query_key_value.bias": bias(3 * d, rows=heads_of_thirds(d)),
                    "attention.dense.weight": hidden(d, d),
                    "attention.dense.bias": bias(d),
                },
                ends=("attention.dense.weight", "attention.dense.bias"),
                attention=softmax(),
            ),
            Limb(
                f"gpt_neox.layers.{i}.",
                "pre",
                {
                    # Reads the block's input, not the attention's result, whatever its name says.
                    "post_attention_layernorm.weight": gain(d, read_by="mlp.dense_h_to_4h.weight"),
                    "post_attention_layernorm.bias": bias(d),
                    "mlp.dense_h_to_4h.weight": hidden(d, 2 * d),
                    "mlp.dense_h_to_4h.bias": bias(2 * d),
                    "mlp.dense_4h_to_h.weight": hidden(2 * d, d),
                    "mlp.dense_4h_to_h.bias": bias(d),
                },
                ends=("mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"),
            ),
        ]

    outside = {
        "gpt_neox.embed_in.weight": lookup(VOCAB, d),
        "gpt_neox.final_layer_norm.weight": gain(d, read_by="lm_head.weight"),
        "gpt_neox.final_layer_norm.bias": bias(d),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])
