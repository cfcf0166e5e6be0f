"""Llama and the decoders that differ from it in their norms, their experts or where their branches read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .table import Fact, Limb, Table
from .vocabulary import EXPERTS, HEAD, VOCAB, experts, gain, halves, hidden, lookup, readout, softmax

# The Llama family: pre-norm, RMSNorm, gated MLP, no biases. What its members change are arguments.


def decoder_build(family: str, *, fixed_kv: int | None = None, **changes: Any) -> Callable[..., nn.Module]:
    def build(width: int, depth: int) -> nn.Module:
        import transformers

        heads = width // HEAD
        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": fixed_kv or heads // 2,
            "head_dim": HEAD,
            "max_position_embeddings": 32,
            "use_cache": False,
            "pad_token_id": None,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if family == "Qwen3Moe":
            settings["moe_intermediate_size"] = 2 * width
        config = getattr(transformers, f"{family}Config")(**settings | changes)
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return build


def llama_attention(d: int, keys: Fact) -> dict[str, Fact]:
    return {
        "self_attn.q_proj.weight": hidden(d, d),
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": keys,
        "self_attn.o_proj.weight": hidden(d, d),
    }


def gated_mlp(d: int) -> dict[str, Fact]:
    return {
        "mlp.gate_proj.weight": hidden(d, 2 * d),
        "mlp.up_proj.weight": hidden(d, 2 * d),
        "mlp.down_proj.weight": hidden(2 * d, d),
    }


def mixture(d: int) -> dict[str, Fact]:
    return {
        # The router: as many rows as experts at any width, so output-like, inside a branch. Its
        # softmax only weighs what the experts return; the path through it is one weight long.
        "mlp.gate.weight": readout(d, EXPERTS),
        "mlp.experts.gate_up_proj": experts(d, 4 * d, rows=halves(2 * d)),
        "mlp.experts.down_proj": experts(2 * d, d),
    }


# Per head: one gain of head_dim numbers for all heads; it feeds the softmax (through rotary, linear).
QK_NORM_PER_HEAD = {
    "self_attn.q_norm.weight": gain(HEAD, reaches="softmax", grows=False),
    "self_attn.k_norm.weight": gain(HEAD, reaches="softmax", grows=False),
}
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def llama(
    d: int, n: int, *, kv: int | None = None, qk_norm: dict[str, Fact] | None = None, moe: bool = False
) -> Table:
    # Keys and values from a fixed number of heads: only their input grows.
    keys = readout(d, kv * HEAD) if kv else hidden(d, d // 2)
    mlp = mixture(d) if moe else gated_mlp(d)
    # Router and experts read the second norm; both are linear maps (tokens are only picked in between).
    mlp_readers = ("mlp.gate.weight", "mlp.experts.gate_up_proj") if moe else tuple(list(mlp)[:2])

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "pre",
                {
                    "input_layernorm.weight": gain(d, read_by=QKV),
                    **llama_attention(d, keys),
                    **(qk_norm or {}),
                },
                ends=("self_attn.o_proj.weight",),
                attention=softmax(),
            ),
            Limb(
                f"model.layers.{i}.",
                "pre",
                # Despite its name it opens the MLP's branch.
                {"post_attention_layernorm.weight": gain(d, read_by=mlp_readers), **mlp},
                ends=("mlp.experts.down_proj" if moe else "mlp.down_proj.weight",),
            ),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d),
        "model.norm.weight": gain(d, read_by="lm_head.weight"),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])


def gemma2(d: int, n: int) -> Table:
    """A norm at both ends of each branch, gains stored as γ − 1, tied head, its own logit scale."""
    zero_centred = partial(gain, offset=1.0)

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "peri",
                {
                    "input_layernorm.weight": zero_centred(d, read_by=QKV),
                    **llama_attention(d, hidden(d, d // 2)),
                    "post_attention_layernorm.weight": zero_centred(d, reaches="stream"),
                },
                # The norm undoes any scale of o_proj: what scales the branch is the norm's gain.
                ends=("post_attention_layernorm.weight",),
                attention=softmax(scale=64**-0.5),
            ),
            Limb(
                f"model.layers.{i}.",
                "peri",
                {
                    "pre_feedforward_layernorm.weight": zero_centred(
                        d, read_by=("mlp.gate_proj.weight", "mlp.up_proj.weight")
                    ),
                    **gated_mlp(d),
                    "post_feedforward_layernorm.weight": zero_centred(d, reaches="stream"),
                },
                ends=("post_feedforward_layernorm.weight",),
            ),
        ]

    outside = {
        # The buffer embed_scale holds √d.
        "model.embed_tokens.weight": lookup(VOCAB, d, tied=("lm_head.weight",), looked_up=d**0.5),
        "model.norm.weight": zero_centred(d, reaches="a tied head"),
    }
    return Table(outside, [block(i) for i in range(n)])


def olmo2(d: int, n: int) -> Table:
    """A norm at the end of each branch only, and QK-norm over all heads at once, so as wide as q and k."""

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "out",
                {
                    **llama_attention(d, hidden(d, d)),
                    "self_attn.q_norm.weight": gain(d, reaches="softmax"),
                    "self_attn.k_norm.weight": gain(d, reaches="softmax"),
                    # Named like Llama's, which is an Input-Norm of the other branch.
                    "post_attention_layernorm.weight": gain(d, reaches="stream"),
                },
                ends=("post_attention_layernorm.weight",),
                attention=softmax(),
            ),
            Limb(
                f"model.layers.{i}.",
                "out",
                {**gated_mlp(d), "post_feedforward_layernorm.weight": gain(d, reaches="stream")},
                ends=("post_feedforward_layernorm.weight",),
            ),
        ]

    outside = {
        "model.embed_tokens.weight": lookup(VOCAB, d),
        "model.norm.weight": gain(d, read_by="lm_head.weight"),
        "lm_head.weight": readout(d, VOCAB),
    }
    return Table(outside, [block(i) for i in range(n)])


def cohere(d: int, n: int) -> Table:
    """x + attention(Nx) + mlp(Nx) with one norm for both, QK-norm with a gain per head, tied head."""

    def block(i: int) -> list[Limb]:
        return [
            Limb(
                f"model.layers.{i}.",
                "pre",
                {
                    # Read by both branches; the table counts it with the first. All readers are linear.
                    "input_layernorm.weight": gain(
                        d, read_by=(*QKV, "mlp.gate_proj.weight", "mlp.up_proj.weight")
                    ),
                    **llama_attention(d, hidden(d, d // 2)),
                    # (heads, head_dim): normalised over the last, a number of its own for each head.
                    "self_attn.q_norm.weight": gain(d // HEAD, HEAD, reaches="softmax"),
                    "self_attn.k_norm.weight": gain(d // HEAD // 2, HEAD, reaches="softmax"),
                },
                ends=("self_attn.o_proj.weight",),
                attention=softmax(),
            ),
            Limb(f"model.layers.{i}.", "pre", gated_mlp(d), ends=("mlp.down_proj.weight",)),
        ]

    outside = {
        # logit_scale is 1/16, whatever the width.
        "model.embed_tokens.weight": lookup(VOCAB, d, tied=("lm_head.weight",), factor=1 / 16),
        "model.norm.weight": gain(d, reaches="a tied head"),
    }
    return Table(outside, [block(i) for i in range(n)])
